// Attachments: pictures and sounds of the types in SHOWN and PLAYED that the server has are shown, and all other attachments
// are links. Also encodes files that people attach.

import * as server from "./server.js";
import { html, useEffect, useState } from "./vendor/standalone.js";

/**
 * The attachments of a message or a result. A `url` is relative to the thread's address, begins with http, or is "" while
 * the file is being sent.
 */
export function Attachments({ files, thread }) {
  if (!files?.length) return null;
  return html`<ul class="attachments" aria-label="Attachments">
    ${files.map((file) => html`<li key=${file.url}><${File} file=${file} thread=${thread} /></li>`)}
  </ul>`;
}

// Only pictures and sounds of these types are shown. The server recognises the types by the files' bytes.
const SHOWN = /^data:image\/(png|jpeg|gif|webp);/;
const PLAYED = /^data:audio\/(wav|mpeg|ogg);/;

function File({ file, thread }) {
  const [data, setData] = useState("");
  const [problem, setProblem] = useState("");
  const told = `${file.name} (${sizeOf(file.size)})`;
  const elsewhere = /^https?:/.test(file.url);
  const read = async () => {
    const url = await dataUrl(await server.attachment(thread, file.url)).catch((error) => setProblem(error.message));
    if (url) setData(url);
    return url;
  };
  useEffect(() => {
    if ((file.kind === "image" || file.kind === "audio") && file.url && !elsewhere) read().catch((error) => setProblem(error.message));
  }, [file.url]);
  const save = async () => {
    const link = document.createElement("a");
    link.href = data || (await read());
    link.download = file.name;
    link.click();
  };
  if (!file.url) return html`<span>${told}</span>`; // it is being sent
  if (elsewhere) return html`<a href=${file.url} target="_blank" rel="noreferrer">${file.name}</a>`;
  if (problem) return html`<span class="soft">${told}: ${problem}</span>`;
  const link = html`<button type="button" class="link" onClick=${() => save().catch((error) => setProblem(error.message))}>${told}</button>`;
  if (PLAYED.test(data)) return html`<figure><audio controls src=${data} aria-label=${file.name}></audio><figcaption>${link}</figcaption></figure>`;
  return SHOWN.test(data) ? html`<figure><img src=${data} alt=${file.name} /><figcaption>${link}</figcaption></figure>` : link;
}

/** A chosen file before it is sent: a small picture if it is one, and its name and size. */
export function Thumbnail({ file }) {
  const [data, setData] = useState("");
  useEffect(() => {
    let gone = false;
    if (file.type.startsWith("image/")) dataUrl(file).then((url) => gone || setData(url), () => {});
    return () => {
      gone = true;
    };
  }, [file]);
  return html`${SHOWN.test(data) && html`<img src=${data} alt="" />`}<span>${file.name} <span class="soft">${sizeOf(file.size)}</span></span>`;
}

function dataUrl(blob) {
  return new Promise((done, failed) => {
    const reader = new FileReader();
    reader.onload = () => done(reader.result);
    reader.onerror = () => failed(reader.error);
    reader.readAsDataURL(blob);
  });
}

export function sizeOf(bytes) {
  if (!(bytes >= 1000)) return `${bytes ?? 0} bytes`;
  return bytes < 1e6 ? `${Math.round(bytes / 1000)} kB` : `${(bytes / 1e6).toFixed(1)} MB`;
}

/** The attachments in a message's content, as AG-UI sends them. */
export function filesIn(content) {
  if (!Array.isArray(content)) return [];
  return content
    .filter((part) => part.source)
    .map(({ type, source, metadata }) => ({ kind: type, url: source.value, name: metadata?.name ?? type, size: metadata?.size ?? 0 }));
}

/** Read a chosen file into the form in which it is sent: its name and its bytes in base64. */
export async function encoded(file) {
  const bytes = new Uint8Array(await file.arrayBuffer());
  let text = "";
  for (let at = 0; at < bytes.length; at += 0x8000) text += String.fromCharCode(...bytes.subarray(at, at + 0x8000));
  return { name: file.name, data: btoa(text) };
}
