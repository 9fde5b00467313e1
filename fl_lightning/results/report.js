"use strict";
for (const chip of document.querySelectorAll(".chips button")) {
  const run = chip.dataset.run;
  chip.addEventListener("click", () => {
    const shown = chip.getAttribute("aria-pressed") !== "true";
    for (const twin of document.querySelectorAll(`button[data-run="${run}"]`)) twin.setAttribute("aria-pressed", shown);
    for (const line of document.querySelectorAll(`svg .${run}`)) line.style.display = shown ? "" : "none";
  });
}
