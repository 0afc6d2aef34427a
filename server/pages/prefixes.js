// The tree of the hottest stems, and who holds them.

import { byId } from "./dom.js";

export class Prefixes {
  show(prefixes) {
    byId("prefixes-panel").hidden = prefixes === null;
  }
}
