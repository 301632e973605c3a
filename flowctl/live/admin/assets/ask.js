// Dialogs: the token, and what is asked before something is done to somebody.

import { Refused, token } from "./api.js";
import { make, put } from "./words.js";

const element = (id) => document.getElementById(id);

/** Ask for the token; tell the page when it changed. */
export function askToken() {
  const dialog = element("token-dialog");
  if (dialog.open) return;
  element("token").value = "";
  dialog.returnValue = "cancel";
  dialog.showModal();
  dialog.onclose = () => {
    const said = element("token").value.trim();
    element("token").value = "";
    if (dialog.returnValue === "use" && said) token.value = said;
    else if (dialog.returnValue === "forget") token.value = "";
    else return;
    dispatchEvent(new Event("flowctl-token"));
  };
}

/**
 * Ask before something is done, with its fields, and do it.
 *
 * `act(values)` does it; what it throws is shown in the dialog, which stays open. Resolves to what came of it, or null.
 */
export function ask({ title, text, fields, does, danger, act }) {
  const dialog = element("ask"), fault = element("ask-fault"), button = element("ask-do");
  put(element("ask-title"), title);
  put(element("ask-text"), text);
  put(fault, "");
  put(button, does);
  button.className = danger ? "main danger" : "main";
  button.disabled = false;
  const inputs = fields.map((field) => inputOf(field));
  element("ask-fields").replaceChildren(...inputs.map(({ label }) => label));
  dialog.showModal();
  return new Promise((resolve) => {
    element("ask-cancel").onclick = () => dialog.close();
    dialog.onclose = () => resolve(null);
    element("ask-form").onsubmit = async (event) => {
      event.preventDefault();
      button.disabled = true;
      put(fault, "");
      try {
        const done = await act(Object.fromEntries(inputs.map(({ name, input }) => [name, input.value.trim()])));
        dialog.onclose = null;
        dialog.close();
        resolve(done);
      } catch (error) {
        put(fault, faultOf(error));
        if (error instanceof Refused && [401, 403].includes(error.status)) askToken();
      } finally {
        button.disabled = false;
      }
    };
  });
}

/** What went wrong, in words, with what helps. */
export function faultOf(error) {
  if (error instanceof Refused && error.status === 401) return "This takes the token. Give it, then try again.";
  if (error instanceof Refused) return error.hint ? `${error.message}. Hint: ${error.hint}` : error.message;
  return "The server does not answer.";
}

function inputOf({ name, label, value = "", hint = "", choices = null, needed = false }) {
  const input = choices
    ? make("select", { name }, ...choices.map(([key, word]) => make("option", { value: key, text: word })))
    : make("input", { name, autocomplete: "off", spellcheck: "false", maxlength: "200" });
  input.value = value;
  input.required = needed;
  const parts = [label, input];
  if (hint) parts.push(make("small", { text: hint }));
  return { name, input, label: make("label", {}, ...parts) };
}
