// Elements. Text from data enters the page as text alone: through `append` and `textContent`, never as markup.

const SVG = "http://www.w3.org/2000/svg";

// An element with a class, properties and children; a child is an element, a text, or null for none.
export function el(tag, { className, on, attrs, style, ...props } = {}, ...children) {
  return filled(document.createElement(tag), { className, on, attrs, style, props }, children);
}

export function svg(tag, { className, on, attrs, style } = {}, ...children) {
  return filled(document.createElementNS(SVG, tag), { className, on, attrs, style, props: {} }, children);
}

function filled(element, { className, on, attrs, style, props }, children) {
  if (className) element.setAttribute("class", className);
  for (const [name, value] of Object.entries(attrs ?? {})) {
    if (value !== null && value !== undefined) element.setAttribute(name, value);
  }
  for (const [name, value] of Object.entries(style ?? {})) element.style.setProperty(name, value);
  for (const [name, handler] of Object.entries(on ?? {})) element.addEventListener(name, handler);
  Object.assign(element, props);
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

// A button that copies a text, and a field to select it from where the page may not use the clipboard.
export function command(text) {
  const code = el("code", { className: "code", textContent: text, attrs: { tabindex: 0 } });
  const button = el("button", {
    className: "copy",
    type: "button",
    textContent: "Copy",
    attrs: { "aria-label": `Copy: ${text}` },
    on: { click: () => copy(text, code, button) },
  });
  return el("div", { className: "command" }, code, button);
}

async function copy(text, code, button) {
  try {
    await navigator.clipboard.writeText(text);
    button.textContent = "Copied";
  } catch {
    getSelection().selectAllChildren(code);
    button.textContent = document.execCommand("copy") ? "Copied" : "Selected";
  }
  setTimeout(() => (button.textContent = "Copy"), 1500);
}

// Texts can hold letters of the Latin alphabet and of scripts written from right to left: each decides for itself.
export function text(className, content) {
  return el("div", { className, textContent: content, dir: "auto" });
}

export function heading(level, content, ...more) {
  return el(`h${level}`, {}, content, ...more);
}

// The heading of a part whose place says enough to those who see it.
export function unseen(content) {
  return el("h2", { className: "unseen", textContent: content });
}

// A table that may be wider than its page: the keyboard scrolls it, too.
export function wide(label, table) {
  return el("div", { className: "wide", attrs: { role: "region", "aria-label": label, tabindex: 0 } }, table);
}

// The chosen one of several buttons that exclude each other, as tabs of a page or kinds of a scale.
export function segments(label, choices, chosen, choose) {
  const buttons = choices.map(([value, name]) =>
    el("button", {
      type: "button",
      textContent: name,
      attrs: { "aria-pressed": String(value === chosen), "data-value": value },
      on: { click: () => choose(value) },
    }),
  );
  return el("div", { className: "segments", attrs: { role: "group", "aria-label": label } }, ...buttons);
}

export function toggle(label, checked, change) {
  const box = el("input", { type: "checkbox", checked, on: { change: (event) => change(event.target.checked) } });
  return el("label", { className: "toggle" }, box, label);
}
