// Runs before the first paint, as a classic script: a theme that arrives later would flash.
const stored = (() => {
  try {
    return localStorage.getItem("muonscope.theme");
  } catch {
    return null; // storage may be switched off; the system's choice then stands
  }
})();
const system = matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
document.documentElement.dataset.theme = stored === "dark" || stored === "light" ? stored : system;
