// The page of a study: figures of the chosen group, one legend for lines that belong together, maps by keyboard.
(function () {
  "use strict";
  var figures = JSON.parse(document.getElementById("data").textContent);
  var hidden = {};  // legend entries that are switched off, by section
  var chosen = 0, printing = 0, drawing = 0;

  function all(selector, from) { return Array.prototype.slice.call((from || document).querySelectorAll(selector)); }
  function made(tag, words, style) {
    var element = document.createElement(tag);
    if (words !== undefined) { element.textContent = words; }
    if (style) { element.className = style; }
    return element;
  }

  // --- figures ---

  function shown() {
    return figures.filter(function (figure) { return figure.group === null || figure.group === chosen; });
  }
  function place(figure) { return document.getElementById("plot-" + figure.id); }
  function home(figure) { return place(figure).closest("[data-legend]"); }
  function entry(trace) { return trace.legendgroup || trace.meta || trace.name; }

  function width(figure, div) {
    return printing ? (figure.small ? printing / 2 - 12 : printing) : div.clientWidth;
  }

  function plot(figure) {
    var off = hidden[home(figure).id] || {}, div = place(figure);
    var traces = figure.data.map(function (trace) {
      return off[entry(trace)] ? Object.assign({}, trace, { visible: false }) : trace;
    });
    var layout = wavetrain.dressed(figure.layout, width(figure, div));
    layout.showlegend = false;
    Plotly.react(div, traces, layout, wavetrain.config);
  }

  // one after the other, those in sight first, so that the page answers meanwhile
  function draw() {
    var left = shown();
    clearTimeout(drawing);
    document.body.dataset.drawn = "no";
    function away(figure) {
      var box = place(figure).getBoundingClientRect();
      return box.bottom < 0 ? -box.bottom : Math.max(0, box.top - window.innerHeight);
    }
    function next() {
      if (!left.length) { document.body.dataset.drawn = "yes"; return; }
      var nearest = left.reduce(function (best, each) { return away(each) < away(best) ? each : best; });
      left.splice(left.indexOf(nearest), 1);
      plot(nearest);
      drawing = setTimeout(next, 0);
    }
    next();
  }
  function drawAll() {
    clearTimeout(drawing);
    shown().forEach(plot);
  }

  // --- legends: buttons, so that a keyboard reaches them ---

  function swatch(trace) {
    var space = "http://www.w3.org/2000/svg", svg = document.createElementNS(space, "svg");
    svg.setAttribute("aria-hidden", "true");
    svg.setAttribute("height", "14");
    function add(tag, attributes) {
      var shape = document.createElementNS(space, tag);
      Object.keys(attributes).forEach(function (key) { shape.setAttribute(key, attributes[key]); });
      svg.appendChild(shape);
    }
    if (trace.type === "bar") {
      svg.setAttribute("width", "14");
      add("rect", { width: 14, height: 14, rx: 2, fill: trace.marker.color });
      if (trace.marker.pattern) { add("path", { d: "M0 14L14 0M0 6L6 0M8 14L14 8", stroke: "#3a4048", "stroke-width": 1.3 }); }
      return svg;
    }
    var dashes = { dot: "2 3", dash: "6 3", dashdot: "7 3 2 3" }, line = trace.line || {};
    svg.setAttribute("width", "28");
    add("line", {
      x1: 1, x2: 27, y1: 7, y2: 7, stroke: line.color, "stroke-width": line.width || 2, "stroke-dasharray": dashes[line.dash] || "none"
    });
    if (/markers/.test(trace.mode)) { add("path", mark(trace.marker)); }
    return svg;
  }

  var MARKS = {
    circle: "M18 7a4 4 0 1 1-8 0a4 4 0 1 1 8 0z", square: "M10.4 3.4h7.2v7.2h-7.2z", diamond: "M14 1.8l5.2 5.2l-5.2 5.2l-5.2-5.2z",
    "triangle-up": "M14 2.2l4.8 8.4h-9.6z", "triangle-down": "M14 11.8l4.8-8.4h-9.6z",
    cross: "M12.4 2h3.2v3.4h3.4v3.2h-3.4v3.4h-3.2v-3.4h-3.4v-3.2h3.4z", x: "M11 2l3 3l3-3l2 2l-3 3l3 3l-2 2l-3-3l-3 3l-2-2l3-3l-3-3z",
    pentagon: "M14 2l5 3.6l-1.9 5.9h-6.2l-1.9-5.9z", star: "M14 1.4l1.6 3.8l4.1.3l-3.1 2.7l1 4l-3.6-2.2l-3.6 2.2l1-4l-3.1-2.7l4.1-.3z"
  };
  function mark(marker) {
    var symbol = (marker && marker.symbol) || "circle", open = /-open$/.test(symbol);
    var path = MARKS[symbol.replace("-open", "")] || "M9 7h10";
    return { d: path, fill: open ? "none" : marker.color, stroke: marker.color, "stroke-width": open ? 1.6 : 0 };
  }

  function legend(list) {
    var own = list.closest("[data-legend]"), seen = {};
    var here = figures.filter(function (figure) { return home(figure) === own; });
    here.forEach(function (figure) {
      figure.data.forEach(function (trace) {
        var key = entry(trace);
        if (trace.showlegend === false || seen[key]) { return; }
        seen[key] = true;
        list.appendChild(item(own.id, key, trace, here));
      });
    });
    list.hidden = list.children.length < 2;
  }
  function item(where, key, trace, here) {
    var line = made("li"), drawn = here.some(function (figure) {
      return figure.data.some(function (each) { return entry(each) === key && each.x.some(function (x) { return x !== null; }); });
    });
    var held = made(drawn ? "button" : "span");
    held.appendChild(swatch(trace));
    held.appendChild(document.createTextNode(trace.meta || trace.name));
    if (drawn) {
      held.type = "button";
      held.setAttribute("aria-pressed", "true");
      held.title = "show or hide";
      held.addEventListener("click", function () {
        var off = hidden[where] = hidden[where] || {};
        off[key] = !off[key];
        held.setAttribute("aria-pressed", String(!off[key]));
        draw();
      });
    }
    line.appendChild(held);
    return line;
  }

  // --- maps: one stop of the tab key, arrows inside, Enter shows a cell ---

  function grid(table) {
    var rows = all("tbody tr", table).map(function (row) {
      return all("td", row).map(function (cell) { return cell.querySelector("button"); });
    });
    var moves = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] };
    function step(down, across, move) {
      for (;;) {
        down += move[0];
        across += move[1];
        if (!rows[down] || across < 0 || across >= rows[down].length) { return null; }
        if (rows[down][across]) { return rows[down][across]; }
      }
    }
    function only(button) {
      rows.forEach(function (row) { row.forEach(function (each) { if (each) { each.tabIndex = each === button ? 0 : -1; } }); });
    }
    rows.forEach(function (row, down) {
      row.forEach(function (button, across) {
        if (!button) { return; }
        button.addEventListener("focus", function () { only(button); });
        button.addEventListener("click", function () { explain(table, button); });
        button.addEventListener("keydown", function (event) {
          var to = moves[event.key] && step(down, across, moves[event.key]);
          if (event.key === "Home") { to = step(down, -1, [0, 1]); }
          if (event.key === "End") { to = step(down, row.length, [0, -1]); }
          if (!to) { return; }
          event.preventDefault();
          to.focus();
        });
      });
    });
    var first = table.querySelector("button.best") || table.querySelector("tbody button");
    if (first) { only(first); explain(table, first); }
  }
  function explain(table, button) {
    var panel = document.getElementById(table.dataset.panel), row = document.getElementById(button.dataset.point);
    var names = all("thead th", row.closest("table")), cells = all("td", row), list = made("dl");
    all("button", table).forEach(function (each) { each.setAttribute("aria-pressed", String(each === button)); });
    cells.slice(1, -1).forEach(function (cell, at) {
      if (cell.textContent === "" || cell.textContent === "-") { return; }
      var pair = made("div");
      pair.append(made("dt", names[at + 2].textContent), made("dd", cell.textContent));
      list.appendChild(pair);
    });
    panel.replaceChildren(made("h4", button.getAttribute("aria-label")), made("p", cells[cells.length - 1].textContent), list);
  }

  // --- groups ---

  function choose(number) {
    var parts = all(".part", document.getElementById("group-" + (chosen + 1)));
    var at = parts.filter(function (part) { return part.getBoundingClientRect().top <= 80; }).pop();
    chosen = number;
    all(".group").forEach(function (group, i) { group.hidden = i !== number; });
    all(".bar a[data-part]").forEach(function (link) {
      link.hash = link.dataset.part + "-" + (number + 1);
      link.parentNode.hidden = !document.getElementById(link.hash.slice(1));
    });
    var there = at && document.getElementById(at.id.replace(/-\d+$/, "-" + (number + 1)));
    if (there) { there.scrollIntoView(); }
    draw();
  }

  figures.forEach(function (figure) { place(figure).style.minHeight = figure.layout.height + "px"; });
  all("ul.legend[data-auto]").forEach(legend);
  all("table.map").forEach(grid);
  choose(0);
  var select = document.getElementById("chooser");
  if (select) { select.addEventListener("change", function () { choose(select.selectedIndex); }); }

  var waiting = 0;
  window.addEventListener("resize", function () { clearTimeout(waiting); waiting = setTimeout(draw, 150); });
  window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
  window.addEventListener("beforeprint", function () {
    document.documentElement.classList.add("printing");
    all(".findings details").forEach(function (more) { more.open = true; });
    printing = 700;
    drawAll();
  });
  window.addEventListener("afterprint", function () {
    document.documentElement.classList.remove("printing");
    printing = 0;
    draw();
  });
})();
