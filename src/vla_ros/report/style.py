"""Style sheet of a report; light or dark mode follows the browser's setting."""

CSS = """
:root{color-scheme:light dark;--bg:#fbfbfa;--card:#ffffff;--ink:#16181d;--soft:#5c626e;--line:#e3e4e8;
--grid:#ececf0;--s0:#8a909c;--s1:#2268d1;--s2:#c2550c;--s3:#0b7f6b;--s4:#8a4bd0;--s5:#b0304f;--s6:#8a6d00;
--good:#0b7a43;--warn:#9a6200;--bad:#bd2130;--good-bg:#e9f7ef;--warn-bg:#fdf4e0;--bad-bg:#fdecee}
@media(prefers-color-scheme:dark){:root{--bg:#111318;--card:#191c22;--ink:#e8e9ed;--soft:#a0a6b3;--line:#2d313a;
--grid:#262a32;--s0:#8b93a1;--s1:#6ea8fe;--s2:#f29a5b;--s3:#4cc3a8;--s4:#bb93ee;--s5:#ee7f98;--s6:#d6b53f;
--good:#5fd39a;--warn:#e9b64f;--bad:#f58b95;--good-bg:#12291e;--warn-bg:#2d2411;--bad-bg:#331a1e}}
*{box-sizing:border-box}
body{margin:0;background:var(--bg);color:var(--ink);font:16px/1.5 system-ui,"Segoe UI",Roboto,sans-serif;
-webkit-text-size-adjust:100%}
main{max-width:1120px;margin:0 auto;padding:24px 16px 64px}
h1{font-size:1.6rem;line-height:1.2;margin:0 0 4px}h2{font-size:1.15rem;margin:40px 0 4px}
h3{font-size:.95rem;margin:0 0 6px}p{margin:4px 0 12px}.lead,.note{color:var(--soft)}.note{font-size:.88rem}
a{color:var(--s1)}code,pre{font:13px/1.45 ui-monospace,SFMono-Regular,Menlo,Consolas,monospace}
pre{overflow-x:auto;background:var(--card);border:1px solid var(--line);border-radius:8px;padding:12px;margin:8px 0}
.verdict{border:1px solid var(--line);border-left:6px solid var(--soft);border-radius:8px;padding:12px 16px;
margin:20px 0;background:var(--card)}.verdict strong{font-size:1.1rem}.verdict ul{margin:8px 0 0;padding-left:20px}
.verdict.good{border-left-color:var(--good);background:var(--good-bg)}.verdict.good .mark{color:var(--good)}
.verdict.warn{border-left-color:var(--warn);background:var(--warn-bg)}.verdict.warn .mark{color:var(--warn)}
.verdict.bad{border-left-color:var(--bad);background:var(--bad-bg)}.verdict.bad .mark{color:var(--bad)}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(150px,1fr));gap:10px;margin:12px 0}
.tile,.card{background:var(--card);border:1px solid var(--line);border-radius:8px;padding:10px 14px;min-width:0}
.tile .label{font-size:.82rem;color:var(--soft)}.tile .value{font-size:1.45rem;font-weight:600;line-height:1.25}
.tile .under{font-size:.8rem;color:var(--soft)}
.cards{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(100%,320px),1fr));gap:12px;margin:12px 0}
.wide{overflow-x:auto}.wide svg{min-width:860px}
.scroll{overflow-x:auto}table{border-collapse:collapse;width:100%;font-size:.9rem;margin:8px 0}
th,td{padding:5px 10px;text-align:left;border-bottom:1px solid var(--line);vertical-align:top}
th{font-weight:600;color:var(--soft);white-space:nowrap}
td.n,th.n{text-align:right;font-variant-numeric:tabular-nums;white-space:nowrap}
tbody tr:hover{background:var(--grid)}
details{margin:8px 0}summary{cursor:pointer;color:var(--s1)}
svg{display:block;width:100%;height:auto;font:11px system-ui,sans-serif}
svg text{fill:var(--soft)}svg .grid{stroke:var(--grid);stroke-width:1}svg .axis{stroke:var(--line);stroke-width:1}
svg .line{fill:none;stroke-width:1.6;stroke-linejoin:round;stroke-linecap:round}svg .back{opacity:.85}
svg .value{fill:var(--ink)}svg .ref{stroke:var(--soft);stroke-dasharray:3 3;stroke-width:1}
svg .ci{stroke:var(--ink);stroke-width:1.3}
.legend{display:flex;flex-wrap:wrap;gap:2px 14px;font-size:.82rem;color:var(--soft);margin:0 0 4px}
.legend i{display:inline-block;width:14px;height:3px;border-radius:2px;margin-right:5px;vertical-align:middle}
figure{margin:0}figcaption{font-size:.78rem;color:var(--soft);text-align:center}
img{max-width:100%;height:auto;border-radius:4px;display:block}
.moment{display:grid;grid-template-columns:88px minmax(0,1fr);gap:8px}
.moment table{margin:0;font-size:.75rem}
.moment th,.moment td{padding:2px 3px}
.flag{display:inline-block;font-size:.78rem;font-weight:600;border-radius:10px;padding:0 8px}
.flag.good{color:var(--good);background:var(--good-bg)}.flag.bad{color:var(--bad);background:var(--bad-bg)}
.flag.warn{color:var(--warn);background:var(--warn-bg)}
footer{margin-top:48px;color:var(--soft);font-size:.82rem;border-top:1px solid var(--line);padding-top:10px}
@media print{body{background:#fff}}
"""
