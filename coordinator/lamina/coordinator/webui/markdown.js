// Markdown as models write it, to DOM nodes: paragraphs, headings, lists, quotes, code, bold, italic, inline code.
// Text only ever becomes text nodes. Links and images stay as they were written. Time is linear in the text.

const MAX_DEPTH = 8; // of lists and quotes within each other, and of emphasis
const sources = new WeakMap(); // element -> the Markdown it was made of

/** Show `text` in `target`. Blocks that did not change since the last call keep their elements. */
export function renderMarkdown(target, text) {
  const blocks = parseBlocks(text.replaceAll("\r", "").split("\n"));
  blocks.forEach((block, i) => {
    const old = target.children[i];
    const source = JSON.stringify(block);
    if (old && sources.get(old) === source) return;
    const made = blockElement(block);
    sources.set(made, source);
    if (old) old.replaceWith(made);
    else target.append(made);
  });
  while (target.children.length > blocks.length) target.lastElementChild.remove();
}

// -- blocks: {type: "code" | "text" | "rule"} with text, or {type: "list" | "quote"} with blocks

const FENCE = /^ {0,3}(?:`{3,}|~{3,})/;
const HEADING = /^ {0,3}(#{1,6})\s+(.*)$/;
const RULE = /^ {0,3}([-*_])(?:\s*\1){2,}\s*$/;
const ITEM = /^( {0,3})([-*+]|\d{1,9}[.)])(\s+|$)/;
const QUOTE = /^ {0,3}> ?/;
const TABLE_ROW = /^\s*\|.*\|\s*$/;

function parseBlocks(lines, depth = 0) {
  const blocks = [];
  let at = 0;
  while (at < lines.length) {
    const line = lines[at];
    const heading = HEADING.exec(line);
    const nests = depth < MAX_DEPTH;
    let block;
    if (line.trim() === "") at += 1;
    else if (isFence(line)) [block, at] = codeBlock(lines, at);
    else if (RULE.test(line)) [block, at] = [{ type: "rule" }, at + 1];
    else if (heading) [block, at] = [headingBlock(heading), at + 1];
    else if (nests && QUOTE.test(line)) [block, at] = quote(lines, at, depth);
    else if (nests && ITEM.test(line)) [block, at] = list(lines, at, depth);
    else if (TABLE_ROW.test(line)) [block, at] = table(lines, at);
    else [block, at] = paragraph(lines, at, nests);
    if (block) blocks.push(block);
  }
  return blocks;
}

/** The page's own headings come first, so a model's begin at the third level. */
function headingBlock([, marks, text]) {
  return { type: "text", tag: `h${Math.min(marks.length + 2, 6)}`, text: text.trim() };
}

/** Backticks with more of them on the line are inline code. */
function isFence(line) {
  const fence = FENCE.exec(line);
  return fence !== null && !line.slice(fence[0].length).includes("`");
}

/** Up to the closing fence, or to the end while it is still being written. */
function codeBlock(lines, at) {
  const fence = FENCE.exec(lines[at])[0].trim();
  const language = lines[at].trim().slice(fence.length);
  const isEnd = (line) => line.trim().startsWith(fence) && line.trim().replaceAll(fence[0], "") === "";
  let end = at + 1;
  while (end < lines.length && !isEnd(lines[end])) end += 1;
  const text = lines.slice(at + 1, end).join("\n");
  return [{ type: "code", language: language.trim().split(/\s/)[0], text }, end + 1];
}

function quote(lines, at, depth) {
  let end = at;
  while (end < lines.length && QUOTE.test(lines[end])) end += 1;
  const inner = lines.slice(at, end).map((line) => line.replace(QUOTE, ""));
  return [{ type: "quote", blocks: parseBlocks(inner, depth + 1) }, end];
}

/** Items of one kind; what is indented below an item belongs to it. */
function list(lines, at, depth) {
  const number = parseInt(ITEM.exec(lines[at])[2], 10);
  const isOrdered = !Number.isNaN(number);
  const block = { type: "list", tag: isOrdered ? "ol" : "ul", start: isOrdered ? number : 1, items: [] };
  while (at < lines.length) {
    const item = ITEM.exec(lines[at]);
    if (!item || /\d/.test(item[2]) !== isOrdered || RULE.test(lines[at])) break;
    const inner = [lines[at].slice(item[0].length)];
    const indent = item[1].length + 2;
    at += 1;
    while (at < lines.length && belongs(lines, at, indent)) {
      const width = Math.min(/^ */.exec(lines[at])[0].length, item[0].length);
      inner.push(lines[at].slice(width));
      at += 1;
    }
    block.items.push(parseBlocks(inner, depth + 1));
    if (lines[at]?.trim() === "" && ITEM.test(lines[at + 1] ?? "")) at += 1;
  }
  return [block, at];
}

/** Whether a line continues an item: indented, or blank before something indented, or the rest of its paragraph. */
function belongs(lines, at, indent) {
  const isIndented = (line) => line !== undefined && line.trim() !== "" && /^ */.exec(line)[0].length >= indent;
  if (lines[at].trim() === "") return isIndented(lines[at + 1]);
  return isIndented(lines[at]) || (lines[at - 1].trim() !== "" && !startsBlock(lines[at]));
}

/** Tables keep their columns by being set in a fixed width. */
function table(lines, at) {
  let end = at;
  while (end < lines.length && TABLE_ROW.test(lines[end])) end += 1;
  return [{ type: "code", language: "", text: lines.slice(at, end).join("\n") }, end];
}

function paragraph(lines, at, nests) {
  let end = at + 1;
  while (end < lines.length && lines[end].trim() !== "" && !(nests && startsBlock(lines[end]))) end += 1;
  const text = lines.slice(at, end).map((line) => line.trim()).join("\n");
  return [{ type: "text", tag: "p", text }, end];
}

function startsBlock(line) {
  return isFence(line) || [HEADING, RULE, ITEM, QUOTE, TABLE_ROW].some((pattern) => pattern.test(line));
}

function blockElement(block) {
  if (block.type === "code") {
    const pre = document.createElement("pre");
    const code = document.createElement("code");
    code.textContent = block.text;
    if (block.language) pre.dataset.language = block.language;
    pre.tabIndex = 0; // so that the keyboard can scroll it
    pre.append(code);
    return pre;
  }
  if (block.type === "rule") return document.createElement("hr");
  if (block.type === "quote") return withChildren("blockquote", block.blocks.map(blockElement));
  if (block.type === "list") {
    const element = withChildren(block.tag, block.items.map(itemElement));
    if (block.start !== 1) element.start = block.start;
    return element;
  }
  return withChildren(block.tag, [inlineNodes(block.text)]);
}

/** An item of a single paragraph is set tight. */
function itemElement(blocks) {
  const isTight = blocks.length > 0 && blocks.filter((block) => block.tag === "p").length === 1;
  return withChildren(
    "li",
    blocks.map((block) => (isTight && block.tag === "p" ? inlineNodes(block.text) : blockElement(block))),
  );
}

function withChildren(tag, children) {
  const element = document.createElement(tag);
  for (const child of children) element.append(child);
  return element;
}

// -- inline: one pass over the delimiters, with a stack of emphasis that is still open

const DELIMITER = /`+|\*+|_+|\\[!-/:-@[-`{-~]/g;
const TAGS = { 1: ["em"], 2: ["strong"], 3: ["strong", "em"] };

/** A fragment of text, code, strong and em. Delimiters without a partner stay text. */
export function inlineNodes(text) {
  const runs = [...text.matchAll(DELIMITER)];
  const ticks = closingTicks(text);
  const open = [{ mark: "", nodes: [] }];
  let from = 0;
  let skipTo = 0;
  for (const run of runs) {
    if (run.index < skipTo) continue;
    const [mark, end] = [run[0], run.index + run[0].length];
    addText(open, text.slice(from, run.index));
    from = end;
    if (mark[0] === "\\") {
      addText(open, mark[1]);
    } else if (mark[0] === "`") {
      const close = ticks.get(run.index);
      if (close === undefined) {
        addText(open, mark);
        continue;
      }
      open.at(-1).nodes.push(inlineCode(text.slice(end, close)));
      from = skipTo = close + mark.length;
    } else {
      emphasis(open, mark, text[run.index - 1] ?? " ", text[end] ?? " ");
    }
  }
  addText(open, text.slice(from));
  while (open.length > 1) flatten(open);
  const fragment = document.createDocumentFragment();
  for (const node of open[0].nodes) fragment.append(node);
  return fragment;
}

/** For each place where a run of backticks begins, the place of the next run of the same length. */
function closingTicks(text) {
  const last = new Map();
  const closing = new Map();
  for (const run of text.matchAll(/`+/g)) {
    if (last.has(run[0])) closing.set(last.get(run[0]), run.index);
    last.set(run[0], run.index);
  }
  return closing;
}

/** One space on either side only sets backticks apart. */
function inlineCode(text) {
  const isPadded = text.startsWith(" ") && text.endsWith(" ") && text.trim() !== "";
  const code = document.createElement("code");
  code.textContent = isPadded ? text.slice(1, -1) : text;
  return code;
}

/** Close the emphasis that this mark opened, or open one, or keep the mark as text. */
function emphasis(open, mark, before, after) {
  const isWord = (letter) => /[\p{L}\p{N}]/u.test(letter);
  const isUnderscore = mark[0] === "_";
  const canClose = /\S/.test(before) && !(isUnderscore && isWord(after));
  const canOpen = /\S/.test(after) && !(isUnderscore && isWord(before));
  const partner = canClose ? open.findLastIndex((entry) => entry.mark === mark) : -1;
  if (partner > 0) {
    while (open.length - 1 > partner) flatten(open);
    const { nodes } = open.pop();
    const wrapped = TAGS[mark.length].reduceRight((inner, tag) => [withChildren(tag, inner)], nodes);
    open.at(-1).nodes.push(...wrapped);
  } else if (canOpen && TAGS[mark.length] && open.length <= MAX_DEPTH) {
    open.push({ mark, nodes: [] });
  } else {
    addText(open, mark);
  }
}

/** The innermost open emphasis was none: its mark is text before what followed it. */
function flatten(open) {
  const { mark, nodes } = open.pop();
  addText(open, mark);
  for (const node of nodes) open.at(-1).nodes.push(node);
}

function addText(open, text) {
  if (text) open.at(-1).nodes.push(document.createTextNode(text));
}
