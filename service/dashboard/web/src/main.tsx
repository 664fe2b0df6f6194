import { createRoot } from "react-dom/client";

import { live } from "./api/live.ts";
import { App } from "./App.tsx";
import { followSystemTheme } from "./theme/theme.ts";

const root = document.getElementById("root");
if (root === null) throw new Error("index.html has no #root");

followSystemTheme();
live.start();
createRoot(root).render(<App />);
