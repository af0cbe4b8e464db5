// Runs before the first paint, so that the chosen theme does not flash. The default is the system's theme.
try {
  const chosen = JSON.parse(localStorage.getItem("handrail.theme"));
  if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
} catch {
  // Storage is not available, so use the system's theme.
}
