"use strict";
const figures = JSON.parse(document.getElementById("figures").textContent);
const plots = [...document.querySelectorAll(".plot")];
const hasChips = (plot) => plot.closest("section").querySelector(".chips") !== null;
const options = {
  responsive: true,
  displaylogo: false,
  modeBarButtons: [["toImage", "zoom2d", "pan2d", "resetScale2d"]], // none that sends data anywhere
  toImageButtonOptions: {format: "svg"},
};
const merged = (one, other) => {
  const both = {...one};
  for (const key in other) {
    const inner = other[key] !== null && typeof other[key] === "object" && !Array.isArray(other[key]);
    both[key] = inner ? merged(one[key] || {}, other[key]) : other[key];
  }
  return both;
};
for (const plot of plots) {
  const figure = figures[plot.dataset.figure];
  const layout = merged({
    autosize: true,
    font: {family: getComputedStyle(document.body).fontFamily, size: 12, color: "#1b1f24"},
    margin: {l: 52, r: 12, t: 28, b: 40},
    showlegend: figure.data.filter((trace) => trace.name).length > 1 && !hasChips(plot),
    legend: {orientation: "h", x: 0, y: -0.27, yanchor: "top"},
    hovermode: "closest",
  }, figure.layout);
  Plotly.newPlot(plot, figure.data, layout, options);
}
for (const button of document.querySelectorAll("button.log")) {
  const plot = button.closest("figure").querySelector(".plot");
  const show = () => button.setAttribute("aria-pressed", plot.layout.yaxis.type === "log");
  button.addEventListener("click", () => {
    const type = plot.layout.yaxis.type === "log" ? "linear" : "log";
    Plotly.relayout(plot, {"yaxis.type": type, "yaxis.autorange": true}).then(show);
  });
  show();
}
for (const chip of document.querySelectorAll(".chips button")) {
  chip.addEventListener("click", () => {
    const shown = chip.getAttribute("aria-pressed") !== "true";
    for (const twin of document.querySelectorAll(".chips button")) {
      if (twin.dataset.group === chip.dataset.group) twin.setAttribute("aria-pressed", shown);
    }
    for (const plot of plots.filter(hasChips)) {
      const traces = plot.data.map((trace, i) => (trace.legendgroup === chip.dataset.group ? i : -1)).filter((i) => i >= 0);
      if (traces.length) Plotly.restyle(plot, {visible: shown}, traces);
    }
  });
}
const resize = () => plots.forEach((plot) => Plotly.Plots.resize(plot));
addEventListener("beforeprint", resize);
addEventListener("afterprint", resize);
