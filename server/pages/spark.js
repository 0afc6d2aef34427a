// A sparkline of the last two minutes, with the value at its top. Single peaks are cut off at the height of the others.

const WIDTH = 120;
const HEIGHT = 28;
const SVG = "http://www.w3.org/2000/svg";

export class Spark {
  constructor(svg, show, windowS = 120) {
    this.show = show;
    this.windowS = windowS;
    this.points = [];
    svg.setAttribute("viewBox", `0 0 ${WIDTH} ${HEIGHT}`);
    svg.setAttribute("preserveAspectRatio", "none");
    svg.setAttribute("aria-hidden", "true");
    this.top = svg.parentElement.insertBefore(document.createElement("span"), svg);
    this.top.className = "spark-top";
    this.area = svg.appendChild(document.createElementNS(SVG, "path"));
    this.area.setAttribute("class", "area");
    this.line = svg.appendChild(document.createElementNS(SVG, "path"));
    this.line.setAttribute("class", "line");
  }

  reset(points) {
    this.points = points;
    this.draw();
  }

  add(at, value) {
    this.points.push([at, value]);
    const first = at - this.windowS;
    while (this.points.length && this.points[0][0] < first) this.points.shift();
    this.draw();
  }

  draw() {
    if (!this.points.length) return;
    const end = this.points.at(-1)[0];
    const values = this.points.map(([, value]) => value ?? 0).sort((one, other) => one - other);
    const top = Math.max(1e-9, values[Math.floor(0.98 * (values.length - 1))]) * 1.08;
    this.top.textContent = top > 1e-6 ? `to ${this.show(top / 1.08)}` : "";
    const runs = [];
    let run = null;
    for (const [at, value] of this.points) {
      if (value === null) {
        run = null;
        continue;
      }
      const x = WIDTH * (1 - (end - at) / this.windowS);
      const y = HEIGHT - 1.5 - (HEIGHT - 3) * Math.min(1, value / top);
      if (run === null) runs.push((run = []));
      run.push([x.toFixed(1), y.toFixed(1)]);
    }
    const path = (points) => points.map(([x, y]) => `${x},${y}`).join("L");
    this.line.setAttribute("d", runs.map((points) => `M${path(points)}`).join(""));
    this.area.setAttribute(
      "d",
      runs.map((points) => `M${points[0][0]},${HEIGHT}L${path(points)}L${points.at(-1)[0]},${HEIGHT}Z`).join(""),
    );
  }
}
