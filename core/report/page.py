"""The HTML page of a report, as a template for jinja2."""

PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{{ title }}</title>
<style>
 body { font: 14px/1.45 system-ui, sans-serif; margin: 2rem auto; max-width: 80rem; padding: 0 1rem; color: #1d2733 }
 table { border-collapse: collapse; width: 100% } th, td { text-align: left; padding: .3rem .6rem; vertical-align: top }
 th { border-bottom: 2px solid #9aa7b4 } tr + tr td { border-top: 1px solid #e3e8ee }
 td:first-child { border-left: 4px solid #2a9d6f } tr.float td:first-child { border-left-color: #d9822b }
 .float td { background: #fdf6ee } code { font: 12.5px ui-monospace, monospace } p.sum { font-size: 1.1rem }
</style></head><body>
<h1>{{ title }}</h1>
<p class="sum">{{ report.summary() }}</p>
<table><thead><tr><th>node</th><th>operator</th><th>module</th><th>rule</th>
<th>how, or why it stays float</th></tr></thead>
<tbody>
{% for row in report.rows %}
<tr class="{{ 'int' if row.quantized else 'float' }}"><td><code>{{ row.node }}</code></td>
<td><code>{{ row.operator }}</code></td><td>{{ row.module_path }}</td><td>{{ row.rule or 'float' }}</td>
<td>{{ row.told }}</td></tr>
{% endfor %}
</tbody></table>
{% if report.violations %}<h2>Broken limits</h2><ul>
{% for violation in report.violations %}<li>{{ violation }}</li>
{% endfor %}</ul>{% endif %}
{% if report.islands %}<h2>Float islands</h2><ol>
{% for island in report.islands %}<li><code>{{ island | join(', ') }}</code></li>
{% endfor %}</ol>{% endif %}
{% if report.foldings %}<h2>Batch norms</h2><ul>
{% for folding in report.foldings %}<li>{{ folding }}</li>
{% endfor %}</ul>{% endif %}
{% if report.notes %}<h2>Notes</h2><ul>
{% for note in report.notes %}<li>{{ note }}</li>
{% endfor %}</ul>{% endif %}
{% if report.boundaries %}<h2>Boundaries</h2>
<table><thead><tr><th>kind</th><th>from</th><th>to</th><th>before</th><th>after</th><th>elements</th>
<th>largest error</th></tr></thead><tbody>
{% for b in report.boundaries %}<tr><td>{{ b.kind }}</td><td><code>{{ b.producer }}</code> {{ b.source }}</td>
<td><code>{{ b.consumers | join(', ') }}</code> {{ b.readers | join(', ') }}</td>
<td>{{ b.before }}</td><td>{{ b.after }}</td>
<td>{{ b.elements if b.elements is not none else 'symbolic' }}</td>
<td>{{ '%.3g' | format(b.error) if b.error is not none else 'not known' }}</td></tr>
{% endfor %}</tbody></table>{% endif %}
{% if report.engines %}<h2>Engines</h2>
<p>{{ report.engines.summary() }}</p>
<table><thead><tr>{% for heading in headings %}<th>{{ heading }}</th>{% endfor %}</tr></thead><tbody>
{% for row in report.engines.rows %}<tr class="{{ 'float' if row.reason else 'int' }}">
{% for cell in row.cells %}<td>{{ cell }}</td>{% endfor %}</tr>
{% endfor %}</tbody></table>{% endif %}
</body></html>
"""
