// Draws every figure and leaves its pictures as text, which a program that reads the page takes out.
(function () {
  "use strict";
  var given = JSON.parse(document.getElementById("data").textContent);
  var stage = document.body.appendChild(document.createElement("div"));

  function keep(name, format, text) {
    var kept = document.createElement("pre");
    kept.id = "picture";
    kept.dataset.name = name;
    kept.dataset.format = format;
    kept.textContent = text;
    document.body.appendChild(kept);
  }

  function layout(figure) {
    var found = wavetrain.dressed(figure.layout, figure.width);
    found.template.layout.margin = { l: 60, r: 20, t: 56, b: 48 };
    return Object.assign(found, {
      title: { text: figure.title, x: 0.01, xanchor: "left", y: 0.97, yanchor: "top", font: { size: 16 } },
      paper_bgcolor: "#ffffff",
      showlegend: figure.layout.showlegend !== false
    });
  }

  function picture(figure, format) {
    var size = { format: format, width: figure.width, height: figure.layout.height, scale: format === "png" ? 2 : 1 };
    return Plotly.toImage(stage, Object.assign(size, { imageDataOnly: true })).then(function (text) {
      keep(figure.name, format, format === "png" ? text : encodeURIComponent(text));
    });
  }

  function one(at) {
    if (at === given.figures.length) { return Promise.resolve(); }
    var figure = given.figures[at];
    return Plotly.newPlot(stage, figure.data, layout(figure), wavetrain.config).then(function () {
      return given.formats.reduce(function (before, format) {
        return before.then(function () { return picture(figure, format); });
      }, Promise.resolve());
    }).then(function () { return one(at + 1); });
  }

  one(0).then(function () { stage.remove(); }, function (error) { keep("", "error", encodeURIComponent(String(error))); });
})();
