// Runs before the first paint, so that the chosen theme does not flash. The default is the system's theme.
try {
  const chosen = JSON.parse(localStorage.getItem("handrail.theme"));
  if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
} catch {
  // No storage: use the system's theme.
}
