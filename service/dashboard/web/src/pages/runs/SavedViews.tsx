/** Named views. A view is its address; this browser only remembers names for them. */

import { useState } from "react";

import { Menu } from "../../components/controls.tsx";
import { BASE, navigate } from "../../routing/router.tsx";

const KEY = "muonscope.views";

interface View {
  name: string;
  search: string;
}

function readViews(): View[] {
  try {
    const parsed: unknown = JSON.parse(localStorage.getItem(KEY) ?? "[]");
    if (!Array.isArray(parsed)) return [];
    return parsed.filter((view): view is View => typeof view?.name === "string" && typeof view?.search === "string");
  } catch {
    return [];
  }
}

export function SavedViews() {
  const [views, setViews] = useState(readViews);
  const [name, setName] = useState("");
  const store = (next: View[]) => {
    setViews(next);
    try {
      localStorage.setItem(KEY, JSON.stringify(next));
    } catch {
      // Storage is switched off: the views last for this page, and the address keeps each of them anyway.
    }
  };
  const save = () => {
    const query = new URLSearchParams(window.location.search);
    query.delete("selected");
    const view = { name: name.trim(), search: query.toString() };
    if (view.name !== "") store([...views.filter((each) => each.name !== view.name), view]);
    setName("");
  };
  return (
    <Menu label="Views">
      {(close) => (
        <>
          {views.length === 0 && <p>A view keeps filter, order, columns and grouping under a name.</p>}
          {views.map((view) => (
            <div className="row" key={view.name}>
              <button
                type="button"
                onClick={() => {
                  navigate(`${BASE}/runs${view.search ? `?${view.search}` : ""}`);
                  close();
                }}
              >
                {view.name}
              </button>
              <button
                type="button"
                className="remove"
                aria-label={`Forget view ${view.name}`}
                onClick={() => store(views.filter((each) => each !== view))}
              >
                ×
              </button>
            </div>
          ))}
          <form
            className="row save-view"
            onSubmit={(event) => {
              event.preventDefault();
              save();
            }}
          >
            <input
              className="field"
              value={name}
              onChange={(event) => setName(event.target.value)}
              placeholder="Name this view"
              aria-label="Name of the view"
              maxLength={80}
            />
            <button type="submit" className="btn" disabled={name.trim() === ""}>
              Save
            </button>
          </form>
        </>
      )}
    </Menu>
  );
}
