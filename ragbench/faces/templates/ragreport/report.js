(() => {
  const night = matchMedia('(prefers-color-scheme: dark)');
  const dark = {
    title: {color: '#e9edf2', subtitleColor: '#a5afbc'},
    axis: {labelColor: '#e9edf2', titleColor: '#a5afbc', gridColor: '#303844', domainColor: '#303844', tickColor: '#303844'},
    legend: {labelColor: '#e9edf2', titleColor: '#a5afbc'},
    text: {color: '#e9edf2'},
  };
  const themed = spec => {
    if (!night.matches) return spec;
    spec.config = spec.config || {};
    for (const part of Object.keys(dark)) spec.config[part] = {...spec.config[part], ...dark[part]};
    return spec;
  };
  const draw = async figure => {
    const live = figure.querySelector('.live');
    try {
      await vegaEmbed(live, themed(JSON.parse(figure.querySelector('script').textContent)), {
        mode: 'vega-lite', renderer: 'svg', ast: true, tooltip: {theme: night.matches ? 'dark' : 'light'},
        actions: {export: true, source: false, compiled: false, editor: false},
      });
      figure.classList.add('drawn');
    } catch (error) {
      live.replaceChildren();
      figure.classList.remove('drawn');
      console.error('chart not drawn: ' + error.message);
    }
  };
  const charts = [...document.querySelectorAll('figure.chart')];
  const drawAll = () => Promise.all(charts.map(draw));
  drawAll();
  night.addEventListener('change', drawAll);
  let closed = [];
  addEventListener('beforeprint', () => {
    closed = [...document.querySelectorAll('main details:not([open])')].filter(d => !d.closest('.live'));
    for (const d of closed) d.open = true;
  });
  addEventListener('afterprint', () => { for (const d of closed) d.open = false; });
})();
