/* Draws the charts of the book. A page holds, per chart, a description and a Vega-Lite spec as JSON; the library that
   draws it (0.9 MB) lies beside the pages and is loaded on pages with charts only. Works from file:// as well. */
(function () {
  "use strict";

  const DARK_CONFIG = /* DARK_CONFIG */ {};
  const LIBRARY = new URL("../vega/vega.js", document.currentScript.src).href;
  const SMALLEST_CELL = 7; // pixels
  let library = null;

  function loadLibrary() {
    library ??= new Promise((resolve, reject) => {
      const script = document.createElement("script");
      script.src = LIBRARY;
      script.onload = () => resolve(window.vegaEmbed);
      script.onerror = () => reject(new Error("the chart library " + LIBRARY + " could not be loaded"));
      document.head.append(script);
    });
    return library;
  }

  const isDark = () => document.documentElement.dataset.theme === "dark";

  function merge(base, extra) {
    const out = { ...base };
    for (const [key, value] of Object.entries(extra)) {
      const nested = value && typeof value === "object" && !Array.isArray(value);
      out[key] = nested ? merge(out[key] || {}, value) : value;
    }
    return out;
  }

  /* Break the title where the page is narrow: the library would cut it off. */
  function wrapTitle(title, width) {
    const text = title && title.text !== undefined ? title.text : title;
    if (!text) return title;
    const perLine = Math.max(16, Math.floor((width - 50) / 8.2)); // the menu button stands beside the first line
    const lines = [""];
    for (const word of [text].flat().join(" ").split(/\s+/)) {
      const last = lines.length - 1;
      if (lines[last] && (lines[last] + " " + word).length > perLine) lines.push(word);
      else lines[last] = lines[last] ? lines[last] + " " + word : word;
    }
    return { ...(title.text !== undefined ? title : {}), text: lines };
  }

  /* A copy of the spec that fits this width and this colour mode. */
  function fitted(spec, width, dark) {
    const out = structuredClone(spec);
    out.config = merge(out.config || {}, dark ? DARK_CONFIG : {});
    out.config.legend = { columns: Math.max(1, Math.floor((width - 60) / 130)), ...out.config.legend };
    out.title = wrapTitle(out.title, width);
    if (out.width === "container") {
      out.width = width - 2;
      out.autosize = { type: "fit-x", contains: "padding" };
    }
    const columns = out.usermeta && out.usermeta.columns;
    if (columns && out.width && out.width.step) {
      const room = Math.max(SMALLEST_CELL, Math.floor((width - 110) / columns));
      for (const side of ["width", "height"]) {
        if (out[side].step) out[side].step = Math.min(out[side].step, room);
      }
    }
    return out;
  }

  class Chart {
    constructor(host) {
      this.host = host;
      this.spec = JSON.parse(host.querySelector("script").textContent);
      this.text = host.querySelector(".gna-chart-text");
      this.target = document.createElement("div");
      this.text.after(this.target);
      this.width = 0;
      // The observer also fires when a chart inside a closed box is shown for the first time.
      new ResizeObserver(() => this.resized()).observe(host);
    }

    resized() {
      const width = this.host.clientWidth;
      if (!width || Math.abs(width - this.width) < 2) return;
      const delay = this.width ? 150 : 0; // while a window is dragged, once at the end is enough
      this.width = width;
      delete this.host.dataset.drawn;
      clearTimeout(this.timer);
      this.timer = setTimeout(() => this.draw(), delay);
    }

    /* One drawing at a time: each takes the width and the colours of the moment when its turn comes. */
    draw() {
      this.last = (this.last || Promise.resolve()).then(() => this.redraw());
    }

    async redraw() {
      if (!this.width) return;
      const dark = isDark();
      this.host.style.minHeight = this.host.offsetHeight + "px"; // the page must not jump meanwhile
      try {
        const embed = await loadLibrary();
        if (this.view) this.view.finalize();
        this.view = await embed(this.target, fitted(this.spec, this.width, dark), {
          renderer: "svg",
          actions: { export: true, source: false, compiled: false, editor: false },
          downloadFileName: "chart",
          tooltip: { theme: dark ? "dark" : "light" },
        });
        this.text.hidden = true;
        this.host.dataset.drawn = dark ? "dark" : "light";
      } catch (error) {
        this.text.hidden = false;
        this.host.dataset.failed = String(error);
        console.error("chart not drawn:", error);
      }
      this.host.style.minHeight = "";
      // Whoever uses a keyboard must be able to scroll a chart that is wider than the page.
      if (this.host.scrollWidth > this.host.clientWidth + 1) this.host.tabIndex = 0;
      else this.host.removeAttribute("tabindex");
    }
  }

  function start() {
    const charts = [...document.querySelectorAll(".gna-chart")].map((host) => new Chart(host));
    if (!charts.length) return;
    new MutationObserver(() => charts.forEach((chart) => chart.draw())).observe(document.documentElement, {
      attributes: true,
      attributeFilter: ["data-theme"],
    });
  }

  if (document.readyState === "loading") document.addEventListener("DOMContentLoaded", start);
  else start();
})();
