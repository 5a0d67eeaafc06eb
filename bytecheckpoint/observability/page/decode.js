// Unpacks the data, and answers questions about one call and its ranks. Text from the journal reaches the page
// as text nodes alone, and plotly through plain().

async function unpack(id) {
  const packed = atob(document.getElementById(id).textContent.trim());
  const bytes = new Uint8Array(packed.length);
  for (let at = 0; at < packed.length; at++) bytes[at] = packed.charCodeAt(at);
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Response(stream).text();
}

function seconds(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return "";
  const size = Math.abs(value);
  if (size >= 100) return `${value.toFixed(0)} s`;
  if (size >= 10) return `${value.toFixed(1)} s`;
  if (size >= 1) return `${value.toFixed(2)} s`;
  if (size >= 0.01) return `${(value * 1e3).toFixed(0)} ms`;
  return size >= 1e-4 || size === 0 ? `${+(value * 1e3).toFixed(1)} ms` : `${(value * 1e6).toFixed(0)} µs`;
}

const SIZES = [["PB", 1e15], ["TB", 1e12], ["GB", 1e9], ["MB", 1e6], ["kB", 1e3]];

function bytes(value) {
  if (value === null || value === undefined) return "";
  for (const [unit, factor] of SIZES) {
    if (value >= factor) return `${(value / factor).toPrecision(3)} ${unit}`;
  }
  return counted(Math.round(value), "byte");
}

// The unit of an axis of sizes, by the largest of them: its name, and how many bytes it has.
function sizeUnit(sizes) {
  const most = Math.max(0, ...sizes);
  return SIZES.find(([, factor]) => most >= factor) ?? ["bytes", 1];
}

const rate = (gbPerS) => (gbPerS === null ? "" : `${bytes(gbPerS * 1e9)}/s`);
const count = (value) => Number(value).toLocaleString("en-US");
const counted = (value, noun) => `${count(value)} ${noun}${value === 1 ? "" : "s"}`;
const ratio = (value) => `${value >= 10 ? value.toFixed(0) : value.toFixed(value < 3 ? 2 : 1)}×`;
const percent = (value) => `${(value * 100).toFixed(value < 0.1 ? 1 : 0)} %`;

// plotly reads a part of HTML in its texts.
const plain = (text) => String(text).replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");

function typical(values) {
  const ordered = Float64Array.from(values).sort();
  return ordered.length ? ordered[(ordered.length - 1) >> 1] : 0;
}

const PHASES = {
  stage: ["#8a94a3", "copies the state, for a background save"],
  metadata: ["#8c6d5a", "reads .metadata"],
  plan: ["#8f63c9", "plans"],
  exchange: ["#c3aee0", "plans travel; mostly waits for others"],
  copy: ["#2f7fd0", "copies strided memory into slots"],
  checksum: ["#21a7b8", "computes checksums"],
  wait_slot: ["#b9c1cc", "waits for a free slot: storage is slower than memory"],
  write: ["#ee8130", "writes, by the I/O threads"],
  flush: ["#f6bd8b", "waits for the last writes"],
  sync: ["#d2423d", "fsync and close"],
  read: ["#ee8130", "reads, by the I/O threads"],
  wait_read: ["#b9c1cc", "waits for a read"],
  verify: ["#21a7b8", "compares checksums"],
  scatter: ["#2f7fd0", "copies into the tensors"],
  send: ["#d668b0", "sends blocks to other ranks"],
  receive: ["#efb2d6", "receives blocks from other ranks"],
  wait_peer: ["#d8c7a0", "waits for blocks that other ranks read"],
  objects: ["#a6a637", "reads and unpacks what is not a tensor"],
  request: ["#ff8d86", "requests to the object store"],
  wait: ["#dcdca8", "waits for the other ranks"],
  assemble: ["#8c6d5a", "joins what was planned with what was written"],
  digest: ["#a6a637", "reads back what was written"],
  commit: ["#3aa655", "commits"],
  sweep: ["#9bd68f", "removes files of older saves"],
};
const MORE_COLOURS = ["#6b7fb5", "#b56b8a", "#7fa36b", "#a38a6b", "#6ba3a0"];
// Their length says what others do, not what the rank does.
const WAITING = new Set(["exchange", "wait_slot", "flush", "wait_read", "wait_peer", "wait"]);
const known = (phase) => (Object.hasOwn(PHASES, phase) ? PHASES[phase] : null);

// Phases in the order in which a call has them, unknown ones last.
function byPlace(a, b) {
  const order = Object.keys(PHASES);
  const place = (name) => (known(name) ? order.indexOf(name) : order.length);
  return place(a) - place(b);
}

function colourOf(phase) {
  if (known(phase)) return known(phase)[0];
  let hash = 0;
  for (const letter of phase) hash = (hash * 31 + letter.charCodeAt(0)) >>> 0;
  return MORE_COLOURS[hash % MORE_COLOURS.length];
}

// One save or load. A unit is a rank, or a block of neighbouring ranks where the page has no figures of single ranks.
class Call {
  constructor(given, index) {
    Object.assign(this, given);
    this.index = index;
    this.report = given.report || {};
    this.num = given.ranks.num;
    this.isBlocks = Boolean(given.ranks.last);
    this.decoded = new Map();
  }

  figure(name) {
    const value = this.report[name];
    return typeof value === "number" ? value : null;
  }

  get totalBytes() {
    return this.figure("total_bytes") ?? this.figure("total_bytes_wanted");
  }

  get title() {
    const what = this.kind === "save" ? "Save" : "Load";
    if (this.step === null) return `${what} of ${this.path ?? "?"}`;
    return `${what} of step ${count(this.step)}${this.part ? ` (${this.part})` : ""}`;
  }

  unpacked(kind, name) {
    const key = `${kind}/${name}`;
    if (!this.decoded.has(key)) {
      const given = Object.hasOwn(this.ranks[kind], name) ? this.ranks[kind][name] : null;
      const values = given && (given[0] === 0 ? new Float64Array(given[1]) : Float64Array.from(given[1], (v) => v * given[0]));
      this.decoded.set(key, values);
    }
    return this.decoded.get(key);
  }

  column(name) { return this.unpacked("columns", name); }
  phase(name) { return this.unpacked("phases", name); }

  typicalOf(kind, name) {
    const key = `typical ${kind}/${name}`;
    if (!this.decoded.has(key)) this.decoded.set(key, typical(this.unpacked(kind, name)));
    return this.decoded.get(key);
  }

  get phases() {
    return Object.keys(this.ranks.phases).sort(byPlace);
  }

  rankOf(unit) { return this.ranks.rank ? this.ranks.rank[unit] : unit; }
  unitOf(rank) {
    if (this.isBlocks) return this.ranks.rank.findIndex((first, unit) => first <= rank && rank <= this.ranks.last[unit]);
    return this.ranks.rank ? this.ranks.rank.indexOf(rank) : rank < this.num ? rank : -1;
  }
  nameOf(unit) {
    return this.isBlocks ? `ranks ${this.rankOf(unit)}–${this.ranks.last[unit]}` : `rank ${this.rankOf(unit)}`;
  }
  hostOf(unit) { return this.ranks.host ? this.ranks.hosts[this.ranks.host[unit]] : null; }

  get axes() {
    const mesh = this.mesh;
    const fits = mesh && !this.isBlocks && Array.isArray(mesh.names) && Array.isArray(mesh.shape)
      && mesh.names.length === mesh.shape.length && mesh.shape.every((size) => Number.isInteger(size) && size > 0)
      && mesh.shape.reduce((a, b) => a * b, 1) === this.world_size;
    return fits ? mesh.names.map((name, axis) => ({ name: String(name), axis, size: mesh.shape[axis] })) : [];
  }

  coordinate(unit, axis) {
    let rank = this.rankOf(unit);
    for (let at = this.mesh.shape.length - 1; at > axis; at--) rank = Math.floor(rank / this.mesh.shape[at]);
    return rank % this.mesh.shape[axis];
  }

  get slowest() {
    const ended = this.column("ended_s");
    return ended ? ended.indexOf(Math.max(...ended)) : 0;
  }
}
