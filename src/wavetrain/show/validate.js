// Draws the figures of the page, anew when it becomes dark, light, wider or narrower.
(function () {
  "use strict";
  var figures = JSON.parse(document.getElementById("data").textContent), waiting = 0;
  function draw() {
    figures.forEach(function (figure) {
      var div = document.getElementById(figure.id), layout = wavetrain.dressed(figure.layout, div.clientWidth);
      layout.showlegend = layout.showlegend && window.innerWidth >= 760;
      Plotly.react(div, figure.data, layout, wavetrain.config);
    });
  }
  draw();
  window.addEventListener("resize", function () { clearTimeout(waiting); waiting = setTimeout(draw, 150); });
  window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
})();
