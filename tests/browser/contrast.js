// The three texts of least contrast with what is behind them: [ratio, text].
const channel = (v) => { v /= 255; return v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4; };
const light = (colour) => {
  const [r, g, b] = colour.match(/[\d.]+/g).map(Number);
  return 0.2126 * channel(r) + 0.7152 * channel(g) + 0.0722 * channel(b);
};
const ground = (e) => {
  for (; e; e = e.parentElement) {
    const colour = getComputedStyle(e).backgroundColor;
    if (!/, 0\)$/.test(colour)) return colour;
  }
  return "rgb(255, 255, 255)";
};
const texts = "h1, h2, h3, p, b, td, th, span, button, a, summary, figcaption, svg text";
const seen = (e) => e.textContent.trim() && e.getClientRects().length && !e.closest('.skip, [aria-pressed="false"]');
return [...document.querySelectorAll(texts)].filter(seen).map((e) => {
  const own = getComputedStyle(e), ink = e.namespaceURI.includes("svg") ? own.fill : own.color;
  const [a, b] = [light(ink), light(ground(e))].sort((x, y) => y - x);
  return [(a + 0.05) / (b + 0.05), e.textContent.slice(0, 40)];
}).sort((x, y) => x[0] - y[0]).slice(0, 3);
