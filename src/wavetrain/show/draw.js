// What pages with figures of plotly share: how they look on light, dark and printed paper.
var wavetrain = (function () {
  "use strict";
  // a list of buttons, because plotly adds one by itself that sends the chart to its makers
  var buttons = ["toImage", "zoom2d", "pan2d", "zoomIn2d", "zoomOut2d", "resetScale2d"];
  var config = { displaylogo: false, plotlyServerURL: "", modeBarButtons: [buttons] };

  function colour(name) {
    return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  }

  function theme() {
    var ink = colour("--ink"), faint = colour("--faint"), line = colour("--line"), clear = "rgba(0,0,0,0)";
    var axis = {
      gridcolor: line, linecolor: line, zerolinecolor: line, automargin: true,
      title: { font: { size: 12.5, color: faint }, standoff: 8 }
    };
    return {
      layout: {
        paper_bgcolor: clear,
        plot_bgcolor: clear,
        font: { color: ink, size: 12, family: "system-ui, -apple-system, 'Segoe UI', Roboto, sans-serif" },
        hoverlabel: { bgcolor: colour("--paper"), bordercolor: line, font: { color: ink }, namelength: -1 },
        modebar: { bgcolor: clear, color: faint, activecolor: ink },
        legend: { font: { size: 11 }, traceorder: "normal" },
        margin: { l: 56, r: 14, t: 30, b: 44 },
        xaxis: axis,
        yaxis: axis
      }
    };
  }

  // as many marks as have room, the last one among them
  function thinned(axis, width) {
    if (!axis || !axis.tickvals || axis.tickmode === "array") { return axis; }  // names of which none may be left out
    var longest = Math.max.apply(null, axis.ticktext.map(function (text) { return text.length; }));
    var count = axis.tickvals.length, most = Math.max(2, Math.floor(width / (7 * longest + 12)));
    var step = Math.ceil(count / most);
    function kept(_, at) { return (count - 1 - at) % step === 0; }
    return Object.assign({}, axis, { tickvals: axis.tickvals.filter(kept), ticktext: axis.ticktext.filter(kept), tickangle: 0 });
  }

  function dressed(layout, width) {
    var narrow = width < 500;
    return Object.assign({}, layout, {
      template: theme(),
      width: width,
      dragmode: narrow ? false : "zoom",
      xaxis: thinned(layout.xaxis, width - 90)
    });
  }

  return { config: config, dressed: dressed };
})();
