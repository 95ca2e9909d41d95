// Draws cards and edges as SVG: rows from left to right, the edge back from the last stage to the first around them.

import { sizeText, timeText } from "./cards.js";

const SVG = "http://www.w3.org/2000/svg";
const WIDTH = 276;
const HEIGHT = 216;
const GAP_X = 84; // room for a round trip on an edge
const GAP_Y = 56;
const PAD = 14;
const MARGIN = 36; // left of the cards, for the edge back when there are several rows
const BAR_X = 14;
const BAR_WIDTH = WIDTH - 2 * BAR_X;

/** The picture, `width` pixels wide. */
export function drawPicture({ cards, edges }, width) {
  const places = layOut(cards.length, edges.length > 0, width);
  const numRows = places.length ? places.at(-1).row + 1 : 0;
  const height = 2 * PAD + numRows * HEIGHT + Math.max(0, numRows - 1) * GAP_Y + (edges.length ? GAP_Y : 0);
  const svg = make("svg", { width, height, role: "img", "aria-label": describe(cards, edges) });
  svg.append(arrowHead());
  edges.forEach((edge) => svg.append(edgeGroup(edge, places, numRows)));
  cards.forEach((card, i) => svg.append(cardGroup(card, places[i])));
  return svg;
}

/** Where the cards stand: as many in a row as there is room for, centred. */
function layOut(count, hasEdges, width) {
  const room = (columns) => columns * WIDTH + (columns - 1) * GAP_X + 2 * PAD;
  let columns = 1;
  while (columns < count && room(columns + 1) <= width) columns += 1;
  const margin = hasEdges && columns < count ? MARGIN : 0;
  if (columns > 1 && room(columns) + margin > width) columns -= 1;
  const left = Math.max(margin, (width - room(columns) + margin) / 2) + (margin ? 0 : PAD);
  return Array.from({ length: count }, (_, i) => {
    const [row, column] = [Math.floor(i / columns), i % columns];
    return { row, x: left + column * (WIDTH + GAP_X), y: PAD + row * (HEIGHT + GAP_Y) };
  });
}

// -- edges

function edgeGroup(edge, places, numRows) {
  const [from, to] = [places[edge.from], places[edge.to]];
  const { path, label } = edge.isFeedback ? backward(from, to, places, numRows) : forward(from, to);
  const group = make("g", { class: edge.isLost ? "edge lost" : edge.isFeedback ? "edge feedback" : "edge" });
  group.append(make("path", { d: path, "marker-end": "url(#arrow)" }));
  const text = [edge.isFeedback ? "tokens" : "", timeText(edge.rttS)].filter(Boolean).join(" · ");
  if (text) group.append(make("text", { x: label.x, y: label.y, "text-anchor": "middle" }, text));
  const what = edge.isFeedback ? "sampled tokens, back to the first stage" : "activations, to the next stage";
  const how = { direct: ", on a direct connection", grpc: ", through gRPC" }[edge.kind] ?? "";
  group.append(make("title", {}, what + how));
  return group;
}

function forward(from, to) {
  if (from.row === to.row) {
    const y = from.y + HEIGHT / 2;
    return { path: `M${from.x + WIDTH} ${y}H${to.x - 4}`, label: { x: (from.x + WIDTH + to.x) / 2, y: y - 8 } };
  }
  const [start, end] = [from.x + WIDTH / 2, to.x + WIDTH / 2];
  const middle = from.y + HEIGHT + GAP_Y / 2;
  const path = `M${start} ${from.y + HEIGHT}V${middle}H${end}V${to.y - 4}`;
  const x = start === end ? start + 46 : (start + end) / 2;
  return { path, label: { x, y: start === end ? middle + 4 : middle - 7 } };
}

function backward(from, to, places, numRows) {
  const below = from.y + HEIGHT + GAP_Y / 2;
  const start = from.x + WIDTH / 2;
  if (numRows === 1) {
    const end = to.x + WIDTH / 2;
    const path = `M${start} ${from.y + HEIGHT}V${below}H${end}V${to.y + HEIGHT + 4}`;
    return { path, label: { x: (start + end) / 2, y: below + 18 } };
  }
  const left = Math.min(...places.map((place) => place.x)) - MARGIN / 2;
  const path = `M${start} ${from.y + HEIGHT}V${below}H${left}V${to.y + HEIGHT / 2}H${to.x - 4}`;
  return { path, label: { x: (left + start) / 2, y: below + 18 } };
}

function arrowHead() {
  const size = { markerWidth: 10, markerHeight: 10, markerUnits: "userSpaceOnUse" };
  const marker = make("marker", { id: "arrow", viewBox: "0 0 8 8", refX: 6, refY: 4, orient: "auto", ...size });
  marker.append(make("path", { d: "M0 0L8 4L0 8z", class: "arrow-head" }));
  const definitions = make("defs");
  definitions.append(marker);
  return definitions;
}

// -- cards

function cardGroup(card, place) {
  const state = card.isUp ? (card.load ? "loading" : "up") : "lost";
  const group = make("g", { class: `card ${state}`, transform: `translate(${place.x} ${place.y})` });
  const stage = card.stage === null ? "" : `stage ${card.stage}`;
  const role = [stage || (card.isUp && "unused"), !card.isUp && "lost"].filter(Boolean).join(" · ");
  group.append(
    make("rect", { class: "frame", width: WIDTH, height: HEIGHT, rx: 10 }),
    text(BAR_X, 27, "name", clip(card.worker, 16)),
    text(WIDTH - BAR_X, 27, "role", role, "end"),
    text(BAR_X, 49, "layers", card.layers),
    text(BAR_X, 69, "muted", clip(card.deviceKind || "device not known yet", 34)),
    make("title", {}, [card.worker, card.address, card.deviceName].filter(Boolean).join("\n")),
  );
  if (card.load) group.append(...loadBar(card.load));
  if (card.memory) group.append(...memoryBar(card.memory));
  if (card.busy) group.append(busyBar(card.busy));
  if (!card.isUp) group.append(text(BAR_X, 184, "", "does not answer; figures are the last"));
  return group;
}

function loadBar({ doneBytes, totalBytes }) {
  const share = totalBytes ? doneBytes / totalBytes : 0;
  return [
    ...bar(84, 14, [{ use: "weights", share }]),
    text(BAR_X, 118, "", totalBytes ? `read ${sizeText(doneBytes)} of ${sizeText(totalBytes)}` : "waiting"),
    text(WIDTH - BAR_X, 118, "", `${Math.floor(100 * share)} %`, "end"),
  ];
}

function memoryBar(parts) {
  const sum = parts.reduce((total, part) => total + part.bytes, 0) || 1;
  const legend = parts.flatMap(({ use, bytes }, i) => {
    const [x, y] = [BAR_X + (i % 2) * 130, 116 + 18 * Math.floor(i / 2)];
    const key = make("rect", { class: `key ${use}`, x, y: y - 9, width: 10, height: 10, rx: 2 });
    return [key, text(x + 15, y, "", `${use} ${sizeText(bytes)}`)];
  });
  return [...bar(84, 14, parts.map(({ use, bytes }) => ({ use, share: bytes / sum }))), ...legend];
}

function busyBar({ ratio, stepsPerS, numSequences }) {
  const busy = Math.round(100 * ratio);
  const group = make("g");
  group.append(
    make("title", {}, `busy ${busy} %, bubble ${100 - busy} %, ${numSequences} sequences`),
    text(BAR_X, 184, "", `busy ${busy} % · bubble ${100 - busy} %`),
    text(WIDTH - BAR_X, 184, "", `${stepsPerS.toFixed(1)} steps/s`, "end"),
    ...bar(192, 10, [{ use: "busy", share: ratio }]),
  );
  return group;
}

/** A bar of shares of the whole; what is there at all is wide enough to be seen. */
function bar(y, height, parts) {
  const shapes = [make("rect", { class: "track", x: BAR_X, y, width: BAR_WIDTH, height, rx: 3 })];
  const shown = parts.filter(({ use, share }) => share > 0 && use !== "free");
  const widths = shown.map(({ share }) => Math.max(4, share * BAR_WIDTH));
  const excess = Math.max(0, widths.reduce((total, width) => total + width, 0) - BAR_WIDTH);
  widths[widths.indexOf(Math.max(...widths))] -= excess;
  let x = BAR_X;
  shown.forEach(({ use }, i) => {
    shapes.push(make("rect", { class: `part ${use}`, x, y, width: Math.max(1, widths[i] - 0.5), height }));
    x += widths[i];
  });
  return shapes;
}

/** The picture in words, for those who don't see it. */
function describe(cards, edges) {
  const stages = cards.map((card) => {
    const where = card.stage === null ? "without a stage" : `stage ${card.stage}, ${card.layers}`;
    const load = card.load ? `, ${sizeText(card.load.doneBytes)} of ${sizeText(card.load.totalBytes)} read` : "";
    const busy = card.busy ? `, busy ${Math.round(100 * card.busy.ratio)} %` : "";
    return `worker ${card.worker}, ${where}${card.isUp ? load + busy : ", lost"}`;
  });
  const trips = edges.filter((edge) => edge.rttS !== null).map((edge) => timeText(edge.rttS));
  return [...stages, ...(trips.length ? [`round trips ${trips.join(", ")}`] : [])].join("; ") || "no workers";
}

// -- elements

function text(x, y, className, content, anchor = "start") {
  return make("text", { x, y, class: className, "text-anchor": anchor }, content);
}

function clip(content, length) {
  return content.length > length ? `${content.slice(0, length - 1)}…` : content;
}

function make(tag, attributes = {}, content = "") {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  if (content) element.textContent = content;
  return element;
}
