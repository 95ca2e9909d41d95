// What /admin/cluster says, as the cards and edges of the picture. Pure: no element, no time.

/**
 * {cards, edges}: a card per stage in pipeline order, then one per worker without a stage.
 * Edges are {from, to, rttS, kind} between indices of cards; rttS is null where it is not known, kind is "direct", "grpc"
 * or, within one worker and where it is not known, empty.
 */
export function clusterCards(cluster) {
  const workers = new Map(cluster.workers.map((worker) => [worker.name, worker]));
  const loading = cluster.state.status === "loading" ? cluster.state.stages : [];
  const isRunning = ["ok", "draining"].includes(cluster.state.status);
  const cards = loading.length
    ? loading.map((stage) => loadingCard(stage, workers.get(stage.worker)))
    : cluster.stages.map((stage) => stageCard(stage, workers.get(stage.worker), isRunning));
  const numStages = cards.length;
  const used = new Set(cards.map((card) => card.worker));
  for (const worker of cluster.workers) if (!used.has(worker.name)) cards.push(idleCard(worker));
  return { cards, edges: edgesOf(cluster, cards, numStages, loading.length > 0) };
}

function edgesOf(cluster, cards, numStages, isLoading) {
  const rtts = new Map(isLoading ? [] : cluster.links.map((link) => [link.from_stage, link.rtt_s]));
  const kinds = new Map(isLoading ? [] : cluster.stages.map((stage) => [stage.stage, stage.link_kind]));
  const edges = [];
  for (let i = 0; numStages > 1 && i < numStages; i += 1) {
    const to = (i + 1) % numStages;
    const isLost = !(cards[i].isUp && cards[to].isUp);
    const [rttS, kind] = [rtts.get(cards[i].stage) ?? null, kinds.get(cards[i].stage) ?? ""];
    edges.push({ from: i, to, rttS, kind, isFeedback: to === 0, isLost });
  }
  return edges;
}

/** How busy a stage was says nothing once its pipeline has ended. */
function stageCard(stage, worker, isRunning) {
  const device = worker?.devices[Number(stage.device.split("/").at(-1))];
  return {
    ...common(worker, stage.worker, device),
    stage: stage.stage,
    layers: layersText(stage.first_layer, stage.num_layers),
    memory: memoryParts(stage, device),
    busy: isRunning && worker?.up ? busyOf(stage) : null,
  };
}

function busyOf(stage) {
  return { ratio: stage.busy_ratio, stepsPerS: stage.steps_per_s, numSequences: stage.num_sequences };
}

function loadingCard(stage, worker) {
  const [first, last = first] = stage.layers.split("-").map(Number);
  return {
    ...common(worker, stage.worker, worker?.devices[0]),
    isUp: true, // it is loading now, whatever was known of it before
    stage: stage.stage,
    layers: layersText(first, last - first + 1),
    load: { doneBytes: stage.done_bytes, totalBytes: stage.total_bytes },
  };
}

function idleCard(worker) {
  const device = worker.devices[0];
  const memory = memoryParts({ weight_bytes: 0, cache_bytes: 0, arena_bytes: 0 }, device);
  return { ...common(worker, worker.name, device), stage: null, layers: "no layers", memory };
}

function common(worker, name, device) {
  return {
    worker: name,
    isUp: worker?.up ?? false,
    address: worker?.address ?? "",
    deviceKind: device ? [device.kind, device.kernel].filter(Boolean).join(" · ") : "",
    deviceName: device?.name ?? "",
  };
}

function layersText(first, count) {
  return count === 1 ? `layer ${first}` : `layers ${first}–${first + count - 1} (${count})`;
}

/** Bytes by use. What the device has beyond that and its free bytes belongs to others, or is kept back by a limit. */
function memoryParts(stage, device) {
  const ours = [
    { use: "weights", bytes: stage.weight_bytes },
    { use: "cache", bytes: stage.cache_bytes },
    { use: "arena", bytes: stage.arena_bytes },
  ];
  if (!device?.total_bytes) return ours;
  const sum = ours.reduce((total, part) => total + part.bytes, device.free_bytes);
  const other = Math.max(0, device.total_bytes - sum);
  return [...ours, { use: "other", bytes: other }, { use: "free", bytes: device.free_bytes }];
}

/** A size with three digits: 948 KiB, 1.25 GiB. */
export function sizeText(bytes) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  while (bytes >= 999.5 && unit < units.length - 1) {
    bytes /= 1024;
    unit += 1;
  }
  return `${unit === 0 ? bytes : bytes.toPrecision(3)} ${units[unit]}`;
}

/** A round trip: 85 µs, 0.21 ms, 12 ms. */
export function timeText(seconds) {
  if (seconds === null) return "";
  if (seconds < 1e-4) return `${Math.round(seconds * 1e6)} µs`;
  return `${Number((seconds * 1e3).toPrecision(2))} ms`;
}
