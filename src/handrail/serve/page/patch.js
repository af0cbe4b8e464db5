// JSON Patch (RFC 6902), as far as AG-UI's deltas use it. Values are never mutated.

/** Returns `value` after applying the operations of `patch`. */
export function patched(value, patch) {
  return (patch ?? []).reduce((whole, operation) => applied(whole, operation), value);
}

function applied(whole, operation) {
  const path = keys(operation.path);
  switch (operation.op) {
    case "add":
      return put(whole, path, operation.value, true);
    case "replace":
      return put(whole, path, operation.value, false);
    case "remove":
      return removed(whole, path);
    case "move":
      return put(removed(whole, keys(operation.from)), path, at(whole, keys(operation.from)), true);
    case "copy":
      return put(whole, path, at(whole, keys(operation.from)), true);
    default:
      return whole; // "test" and unknown operations are ignored
  }
}

function keys(pointer) {
  if (!pointer) return [];
  return pointer.slice(1).split("/").map((key) => key.replaceAll("~1", "/").replaceAll("~0", "~"));
}

function at(value, path) {
  return path.reduce((inner, key) => inner?.[key], value);
}

function put(value, [key, ...rest], given, insert) {
  if (key === undefined) return given;
  if (Array.isArray(value)) {
    const copy = [...value];
    const place = key === "-" ? copy.length : Number(key);
    if (rest.length) copy[place] = put(copy[place], rest, given, insert);
    else copy.splice(place, insert ? 0 : 1, given);
    return copy;
  }
  return { ...value, [key]: put(value?.[key], rest, given, insert) };
}

function removed(value, [key, ...rest]) {
  if (key === undefined || value === null || typeof value !== "object") return value;
  if (Array.isArray(value)) {
    if (rest.length) return value.map((item, place) => (place === Number(key) ? removed(item, rest) : item));
    return value.filter((_, place) => place !== Number(key));
  }
  if (rest.length) return { ...value, [key]: removed(value[key], rest) };
  const { [key]: _, ...others } = value;
  return others;
}
