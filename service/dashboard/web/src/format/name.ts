/** Where a name may be cut: what tells an experiment's runs apart stays. Pure. */

export interface NamePart {
  text: string;
  /** Whether it is cut where there is no room: at once, when nothing else is left to cut, or not at all. */
  gives: "first" | "last" | "no";
}

/** What a run table's narrowest cell shows whole. */
const SHORT = 24;
/** Names begin alike and end in what tells them apart: that much of the end stays. */
const TAIL = 12;

/** An experiment names its runs `name field=value field=value`: fields give way before the name, values do not. */
export function cutName(name: string): NamePart[] {
  if (name.length <= SHORT) return [{ text: name, gives: "no" }];
  const fields = name.match(/ [\w.[\]]+=/g);
  if (fields === null) return [part(name.slice(0, -TAIL), "last"), part(name.slice(-TAIL), "no")];
  const first = name.indexOf(fields[0]);
  const pairs = name.slice(first + 1).split(/ (?=[\w.[\]]+=)/);
  return [
    part(name.slice(0, first), "last"),
    ...pairs.flatMap((pair) => {
      const at = pair.indexOf("=") + 1;
      const [field, value] = [pair.slice(0, at), pair.slice(at)];
      const begin = value.length - TAIL;
      const values = begin > 0 ? [part(value.slice(0, begin), "last"), part(value.slice(begin), "no")] : [part(value, "no")];
      return [part(" ", "no"), part(field, "first"), ...values];
    }),
  ];
}

function part(text: string, gives: NamePart["gives"]): NamePart {
  return { text, gives };
}
