// The conversations of this browser, in its local storage, the latest first.

const KEY = "headstart.conversations";
const MAX = 50;
const DEFAULTS = { system: "", temperature: 0.7, maxTokens: 512 };

export class Conversations {
  constructor() {
    this.all = load();
    this.current = this.all[0] ?? null;
    if (this.current === null) this.create();
    addEventListener("storage", ({ key }) => key === KEY && this.follow());
  }

  /** Takes what another tab has saved, and keeps the conversations that only this one has or shows. */
  follow() {
    const own = new Map(this.all.filter((each) => each === this.current || !each.messages.length).map((each) => [each.id, each]));
    const stored = load().map((each) => own.get(each.id) ?? each);
    this.all = [...[...own.values()].filter((each) => !stored.includes(each)), ...stored];
  }

  /** Begins a conversation with the settings of the last one, or reuses an empty one. */
  create() {
    const empty = this.all.find((each) => each.messages.length === 0);
    if (empty) {
      this.current = empty;
      return;
    }
    const { system, temperature, maxTokens } = this.current ?? DEFAULTS;
    this.current = { id: crypto.randomUUID?.() ?? String(Date.now()), title: "New chat", system, temperature, maxTokens, messages: [] };
    this.all.unshift(this.current);
  }

  pick(id) {
    this.current = this.all.find((each) => each.id === id) ?? this.current;
  }

  remove(id) {
    this.all = this.all.filter((each) => each.id !== id);
    if (this.current.id === id) {
      this.current = this.all[0] ?? null;
      if (this.current === null) this.create();
    }
    this.save();
  }

  /** Moves the conversation up, and drops the oldest ones when the browser's storage is full. */
  save() {
    const used = this.all.filter((each) => each.messages.length);
    for (let kept = used.slice(0, MAX); ; kept = kept.slice(0, -1)) {
      try {
        localStorage.setItem(KEY, JSON.stringify(kept));
        return;
      } catch (error) {
        if (!kept.length) return;
      }
    }
  }

  touch(conversation) {
    if (!this.all.includes(conversation)) return; // deleted while it was answered
    this.all = [conversation, ...this.all.filter((each) => each !== conversation)];
    this.save();
  }
}

function load() {
  try {
    const stored = JSON.parse(localStorage.getItem(KEY) ?? "[]");
    return Array.isArray(stored) ? stored.filter((each) => each?.id && Array.isArray(each.messages)).map((each) => ({ ...DEFAULTS, ...each })) : [];
  } catch {
    return [];
  }
}
