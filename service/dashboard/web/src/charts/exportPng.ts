/** The charts on screen as one picture: the panels' canvases under their titles, on the page's own background. */

import { cssColour } from "./paint.ts";

const TITLE = 22;

export function downloadPng(stack: HTMLElement, name: string): void {
  const ratio = devicePixelRatio;
  const panels = [...stack.querySelectorAll<HTMLElement>(".panel")].map((panel) => ({
    title: panel.querySelector("h3")?.textContent ?? "",
    canvas: panel.querySelector("canvas"),
  }));
  const width = Math.max(...panels.map(({ canvas }) => canvas?.width ?? 0));
  const height = panels.reduce((sum, { canvas }) => sum + (canvas?.height ?? 0) + TITLE * ratio, 8 * ratio);
  const picture = document.createElement("canvas");
  picture.width = width;
  picture.height = height;
  const context = picture.getContext("2d");
  if (!context) return;
  context.fillStyle = cssColour("--surface");
  context.fillRect(0, 0, width, height);
  let top = 8 * ratio;
  for (const { title, canvas } of panels) {
    context.fillStyle = cssColour("--ink");
    context.font = `560 ${12 * ratio}px "Inter Variable"`;
    context.textBaseline = "middle";
    context.fillText(title, 14 * ratio, top + (TITLE * ratio) / 2);
    top += TITLE * ratio;
    if (canvas) {
      context.drawImage(canvas, 0, top);
      top += canvas.height;
    }
  }
  picture.toBlob((blob) => {
    if (!blob) return;
    const url = URL.createObjectURL(blob);
    const link = document.createElement("a");
    link.href = url;
    link.download = name;
    link.click();
    setTimeout(() => URL.revokeObjectURL(url), 10_000);
  });
}
