// Reading a report by mouse and keyboard. Without it the page is the same, and still.
'use strict';
const tip = document.createElement('output');
tip.className = 'tip';
tip.hidden = true;
document.body.append(tip);

function show(text, x, y) {
  tip.textContent = text;
  tip.hidden = false;
  tip.style.left = Math.max(4, Math.min(x + 14, innerWidth - tip.offsetWidth - 4)) + 'px';
  tip.style.top = Math.max(4, y + 20 + tip.offsetHeight > innerHeight ? y - tip.offsetHeight - 14 : y + 20) + 'px';
}
function hide() { tip.hidden = true; }
addEventListener('keydown', event => { if (event.key === 'Escape') hide(); });
addEventListener('scroll', hide, {passive: true});

// Curves: the values at the step under the pointer, or chosen by the arrow keys.
for (const chart of document.querySelectorAll('svg.chart')) {
  const {first, last, values} = JSON.parse(chart.dataset.curves);
  const steps = [...new Set(Object.values(values).flat().map(point => point[0]))].sort((a, b) => a - b);
  const line = document.createElementNS('http://www.w3.org/2000/svg', 'line');
  line.setAttribute('class', 'reader');
  line.setAttribute('y1', '14');
  line.setAttribute('y2', '158');
  line.style.display = 'none';
  chart.append(line);
  let at = 0;
  const read = (index, y) => {
    at = Math.max(0, Math.min(index, steps.length - 1));
    const box = chart.getBoundingClientRect(), share = (steps[at] - first) / (last - first);
    for (const end of ['x1', 'x2']) line.setAttribute(end, 100 * share + '%');
    line.style.display = '';
    const found = Object.entries(values).flatMap(([name, points]) => {
      const point = points.find(each => each[0] === steps[at]);
      return point ? [`${name}: ${+point[1].toPrecision(6)}`] : [];
    });
    show(`step ${steps[at]}\n${found.join('\n')}`, box.left + share * box.width, y ?? box.top + 20);
  };
  chart.addEventListener('pointermove', event => {
    const box = chart.getBoundingClientRect();
    const step = first + (event.clientX - box.left) / box.width * (last - first);
    let near = 0;
    steps.forEach((each, index) => { if (Math.abs(each - step) < Math.abs(steps[near] - step)) near = index; });
    read(near, event.clientY);
  });
  chart.addEventListener('keydown', event => {
    const by = {ArrowLeft: -1, ArrowRight: 1}[event.key];
    if (by) { event.preventDefault(); read(at + by); }
  });
  for (const end of ['pointerleave', 'blur']) chart.addEventListener(end, () => { line.style.display = 'none'; hide(); });
}

// Pipelines: what each action is, and zoom; pipelines of one page show the same time.
const pipelines = [...document.querySelectorAll('svg.pipeline')];
const whole = Math.max(...pipelines.map(svg => +svg.dataset.end));
let from = 0, to = whole;

function place() {
  const share = seconds => 100 * (seconds - from) / (to - from);
  for (const svg of pipelines) {
    const width = svg.getBoundingClientRect().width;
    for (const box of svg.querySelectorAll('rect.act')) {
      const left = share(+box.dataset.b), right = share(+box.dataset.e);
      const seen = right > 0 && left < 100;
      box.style.display = seen ? '' : 'none';
      const label = box.nextElementSibling?.matches('text.number') ? box.nextElementSibling : null;
      if (label) label.setAttribute('visibility', 'hidden');
      if (!seen) continue;
      box.setAttribute('x', Math.max(-1, left) + '%');
      box.setAttribute('width', Math.max(0, Math.min(101, right) - Math.max(-1, left)) + '%');
      if (!label) continue;
      label.setAttribute('x', (Math.max(0, left) + Math.min(100, right)) / 2 + '%');
      const room = (Math.min(100, right) - Math.max(0, left)) / 100 * width;
      if (room >= 7.5 * label.textContent.length + 3) label.setAttribute('visibility', 'visible');
    }
    const texts = [...svg.querySelectorAll('text.time')], ms = (to - from) * 1e3;
    const rough = ms / Math.min(texts.length, Math.max(1, width / 90));
    const unit = 10 ** Math.floor(Math.log10(rough));
    const step = unit * [1, 2, 5, 10].find(factor => unit * factor >= 0.999 * rough);
    const first = Math.ceil(from * 1e3 / step - 1e-9);
    texts.forEach((text, index) => {
      const at = (first + index) * step, part = (at / 1e3 - from) / (to - from);
      text.setAttribute('visibility', part > 1.0001 ? 'hidden' : 'visible');
      text.setAttribute('x', 100 * part + '%');
      text.setAttribute('text-anchor', part < 0.02 ? 'start' : part > 0.95 ? 'end' : 'middle');
      text.textContent = `${+at.toPrecision(6)} ms`;
    });
  }
}
function view(start, length) {
  length = Math.max(whole / 1000, Math.min(whole, length));
  from = Math.max(0, Math.min(start, whole - length));
  to = from + length;
  hide();
  place();
}
function zoom(factor, share = 0.5) { view(from + share * (to - from) * (1 - factor), (to - from) * factor); }

for (const svg of pipelines) {
  const boxes = [...svg.querySelectorAll('rect.act')];
  for (const box of boxes) {  // the browser's own tip would be a second one
    const title = box.querySelector('title');
    box.dataset.tip = title.textContent;
    title.remove();
  }
  let chosen = null, pulled = null;
  const choose = box => {
    chosen?.classList.remove('chosen');
    chosen = box;
    box.classList.add('chosen');
    const middle = (+box.dataset.b + +box.dataset.e) / 2;
    if (middle < from || middle > to) view(middle - (to - from) / 2, to - from);
    const at = box.getBoundingClientRect();
    show(box.dataset.tip, at.left + at.width / 2, at.bottom - 14);
  };
  svg.addEventListener('pointermove', event => {
    if (pulled !== null) {
      view(from + (pulled - event.clientX) / svg.getBoundingClientRect().width * (to - from), to - from);
      pulled = event.clientX;
    } else if (event.target.dataset.tip) show(event.target.dataset.tip, event.clientX, event.clientY);
    else hide();
  });
  svg.addEventListener('pointerdown', event => { pulled = event.clientX; svg.setPointerCapture(event.pointerId); });
  for (const end of ['pointerup', 'pointercancel']) svg.addEventListener(end, () => { pulled = null; });
  for (const end of ['pointerleave', 'blur']) svg.addEventListener(end, hide);
  svg.addEventListener('wheel', event => {
    if (!event.ctrlKey && !event.shiftKey) return;  // the page scrolls
    event.preventDefault();
    const box = svg.getBoundingClientRect();
    zoom((event.deltaY || event.deltaX) > 0 ? 1.25 : 0.8, (event.clientX - box.left) / box.width);
  }, {passive: false});
  svg.addEventListener('keydown', event => {
    const by = {ArrowLeft: -1, ArrowRight: 1}[event.key];
    if (by) {
      const next = boxes[boxes.indexOf(chosen) + by] ?? boxes[by > 0 ? 0 : boxes.length - 1];
      choose(next);
    } else if (event.key === '+' || event.key === '=') zoom(0.5);
    else if (event.key === '-') zoom(2);
    else if (event.key === '0') view(0, whole);
    else return;
    event.preventDefault();
  });
  const buttons = document.createElement('p');
  buttons.className = 'zoom';
  const acts = {
    'zoom in': () => zoom(0.5), 'zoom out': () => zoom(2), 'earlier': () => view(from - (to - from) / 2, to - from),
    'later': () => view(from + (to - from) / 2, to - from), 'whole step': () => view(0, whole),
  };
  for (const [name, act] of Object.entries(acts)) {
    const button = document.createElement('button');
    button.type = 'button';
    button.textContent = name;
    button.addEventListener('click', act);
    buttons.append(button);
  }
  buttons.append(' Or Shift and the wheel, drag; with the keyboard + − 0 and arrows.');
  svg.before(buttons);
}
addEventListener('resize', place);
if (pipelines.length) place();
