// Runs before the page is drawn, so that a chosen theme does not flash. Without a choice the system's holds.
try {
  const chosen = JSON.parse(localStorage.getItem("handrail.theme"));
  if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
} catch {
  // Storage is off: the system's theme holds.
}
