"""A text that Octavo carries to look at a model with: it sets the scales of an FP8 KV cache, and checks one.

Prose, a list, numbers, code, mark-up and other scripts, since keys and values of rare tokens are often the largest.
"""

from __future__ import annotations

TEXT = """The ferry left the harbour at ten past six, two minutes late, with forty-one passengers and a crate of
pears. Nobody on board had asked for the pears. They belonged to a man in Kirkwall who had paid for them
in March, forgotten them in April, and written a very polite letter in May. "I do not mind the delay," he
wrote, "but I should like to know whether they are ripe." The captain, who read the letter twice,
answered on the back of a tide table: "They were."

Questions that came up on the way:
1. How far is it to the lighthouse? About 12.5 nautical miles, or 23.15 km.
2. What does the return cost? 18.40 EUR; children under 7 travel free, dogs pay 3.00.
3. Who keeps the light now? Since 1987, nobody: it is switched by a photocell.

def tide_height(hours: float, mean: float = 2.1, swing: float = 1.7) -> float:
    # Height of the water in metres, from a single cosine with the period of the moon.
    period = 12.4206
    return mean + swing * math.cos(2 * math.pi * (hours % period) / period)

for hour in range(0, 24, 3):
    print(f"{hour:02d}:00  {tide_height(hour):5.2f} m")

| port      | depth | berths |
|-----------|------:|-------:|
| Kirkwall  |   6.5 |     12 |
| Stromness |   5.0 |      8 |

{"vessel": "Marigold", "tonnes": 312, "crew": ["Ann", "Tormod", "Li Wei"], "radio": {"channel": 16, "open": true}}

Guten Morgen, sagte der Steuermann. Bonjour, répondit la mer. Доброе утро. おはようございます。 早上好。 صباح الخير

Later the wind went round to the north-west and the sea got up, short and grey. Half the passengers went
below; the other half held the rail and pretended to look at birds. There were, in fact, birds: fulmars,
stiff-winged and curious, and one skua that had its eye on somebody's sandwich. By the time the island
came out of the rain the sandwich was gone, the pears had rolled from one side of the deck to the other
eleven times, and the man from the museum had finished explaining, to no one who had asked, that the
first keeper of the light had owned three clocks, none of which agreed, and that he had therefore always
known what time it was to within a quarter of an hour, which was all that ships needed before the railway
came. The engine slowed. Someone threw a line, someone caught it, and the harbour took them in.
"""
