// The ops key: entered once, kept in this tab's session storage, sent with every call of the ops port.

import { byId, setText } from "./dom.js";

const KEY = "headstart.ops-key";

export const headers = () => {
  const key = sessionStorage.getItem(KEY);
  return key ? { authorization: `Bearer ${key}` } : {};
};

/** Asks for the key. Resolves to true if one was given. */
export function askForKey(problem = "") {
  const dialog = byId("key-dialog");
  const input = byId("key-input");
  input.value = sessionStorage.getItem(KEY) ?? "";
  byId("key-problem").hidden = !problem;
  setText(byId("key-problem"), problem);
  dialog.returnValue = "";
  if (!dialog.open) dialog.showModal();
  input.select();
  return new Promise((resolve) => {
    dialog.addEventListener(
      "close",
      () => {
        const given = dialog.returnValue === "save";
        if (given && input.value) sessionStorage.setItem(KEY, input.value.trim());
        else if (given) sessionStorage.removeItem(KEY);
        resolve(given);
      },
      { once: true },
    );
  });
}

/** Calls the ops port and asks for the key when one is needed. Throws an Error with the remedy. */
export async function callOps(path, options = {}) {
  for (;;) {
    const response = await fetch(path, { ...options, headers: { ...headers(), ...options.headers } });
    if (response.ok) return response.json();
    const body = await response.json().catch(() => ({}));
    const message = body.error?.message ?? `The gateway answered ${response.status}.`;
    if (response.status !== 401 || !(await askForKey(message))) throw new Error(message);
  }
}
