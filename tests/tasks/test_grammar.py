"""The embedded sentence pairs: the splits, sentences checked by hand for every rule, and the digest of all pairs."""

import hashlib
from collections import Counter

import pytest

from tasks.translation.grammar import grammar_splits

SPLITS = grammar_splits()
PAIRS = [pair for pairs in SPLITS.values() for pair in pairs]


def words_of(sentence):
    return [word.strip(".,?").lower() for word in sentence.split()]


@pytest.mark.parametrize("language", [0, 1])
def test_no_sentence_occurs_twice_and_held_out_words_are_known(language):
    assert max(Counter(pair[language].casefold() for pair in PAIRS).values()) == 1
    seen = Counter(word for pair in SPLITS["train"] for word in words_of(pair[language]))
    assert 150 < len(seen) < 400
    held_out = {word for split in ("validation", "test") for pair in SPLITS[split] for word in words_of(pair[language])}
    assert min(seen[word] for word in held_out) >= 2
    assert all(2 <= len(pair[language].split()) <= 21 for pair in PAIRS)


def test_all_pairs_are_the_same_on_every_machine_and_whatever_the_hash_seed():
    # After a change of a word or rule, write the new digest here; scores are then not comparable with older ones.
    assert hashlib.sha256(repr(SPLITS).encode()).hexdigest().startswith("66ceb3554d7b5656")


@pytest.mark.parametrize(
    ("english", "german"),
    [
        # The finite verb is second; a modal verb, the perfect and a prefix close the clause.
        ("Today she visits our girls.", "Heute besucht sie unsere Mädchen."),
        ("Our uncle picks up an old sister now.", "Unser Onkel holt jetzt eine alte Schwester ab."),
        ("I picked up a young girl.", "Ich habe ein junges Mädchen abgeholt."),
        ("He went home this morning.", "Er ist heute Morgen nach Hause gegangen."),
        ("Today we have to write our girl his letter.", "Heute müssen wir unserem Mädchen seinen Brief schreiben."),
        ("Every day her brothers do not see the doctors.", "Jeden Tag sehen ihre Brüder die Ärzte nicht."),
        # It is first in a question and last in a subordinate clause, after its prefix.
        ("Did we get up early last week?", "Sind wir letzte Woche früh aufgestanden?"),
        ("Do we get up early now?", "Stehen wir jetzt früh auf?"),
        ("I know that I cannot help my men.", "Ich weiß, dass ich meinen Männern nicht helfen kann."),
        (
            "The uncle can pick up a girl because he is hungry.",
            "Der Onkel kann ein Mädchen abholen, weil er hungrig ist.",
        ),
        ("The girl who went to the city is tired.", "Das Mädchen, das in die Stadt gegangen ist, ist müde."),
        (
            "The girls who thank my grandmothers now are sick.",
            "Die Mädchen, die jetzt meinen Großmüttern danken, sind krank.",
        ),
        # Articles and adjectives agree in gender, number and case; a pronoun takes the gender of its noun.
        (
            "Yesterday her sister gave these sisters his egg.",
            "Gestern hat ihre Schwester diesen Schwestern sein Ei gegeben.",
        ),
        (
            "Does the girl give our uncles an old bicycle now?",
            "Gibt das Mädchen jetzt unseren Onkeln ein altes Fahrrad?",
        ),
        ("My child can call her men because it is sick.", "Mein Kind kann ihre Männer anrufen, weil es krank ist."),
        ("My sister swam with our old children.", "Meine Schwester ist mit unseren alten Kindern geschwommen."),
    ],
)
def test_sentences_checked_by_hand(english, german):
    assert dict(PAIRS)[english] == german
