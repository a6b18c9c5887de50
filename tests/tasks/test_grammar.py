"""The embedded sentence pairs: the splits, sentences written by hand for every rule, and the digest of all pairs."""

import hashlib
from collections import Counter
from dataclasses import replace

import pytest

from tasks.translation.grammar import (
    Clause,
    because,
    both,
    finish,
    german_subordinate,
    grammar_splits,
    located,
    reported,
    said,
    when,
    with_relative_object,
    with_relative_subject,
    with_verb,
    words_of,
)
from tasks.translation.lexicon import BE, NOUNS, PRONOUNS, VERB_ROWS, Phrase, prepositional

SPLITS = grammar_splits()
PAIRS = [pair for pairs in SPLITS.values() for pair in pairs]


# --- The splits ---


@pytest.mark.parametrize("language", [0, 1])
def test_no_sentence_occurs_twice_within_a_split_or_across_splits(language):
    counts = Counter(pair[language].casefold() for pair in PAIRS)
    assert max(counts.values()) == 1


@pytest.mark.parametrize("language", [0, 1])
@pytest.mark.parametrize("split", ["validation", "test"])
def test_every_word_of_a_held_out_sentence_occurs_in_training_five_times(split, language):
    seen = Counter(word for pair in SPLITS["train"] for word in words_of(pair[language]))
    assert all(seen[word] >= 5 for pair in SPLITS[split] for word in words_of(pair[language]))


@pytest.mark.parametrize("language", [0, 1])
def test_the_vocabulary_is_small_and_sentences_are_short(language):
    assert 250 < len({word for pair in PAIRS for word in words_of(pair[language])}) < 475
    assert all(5 <= len(pair[language].split()) <= 16 for pair in PAIRS)


def test_all_pairs_are_the_same_on_every_machine_and_whatever_the_hash_seed():
    # After a change of a word or rule, write the new digest here; scores are then not comparable with older ones.
    assert hashlib.sha256(repr(SPLITS).encode()).hexdigest().startswith("d7c652f993d4a936")


# --- Sentences written by hand ---


DETERMINERS_IN_ENGLISH = ("the", "a", "an", "this", "these", "two", "my", "his", "her", "our")


def phrase(text, tail=("", "")):
    """The noun phrase of an English text: perhaps a determiner, perhaps an adjective, a noun."""
    *before, last = text.split()
    noun = next(n for n in NOUNS if last in (n.english, n.english_plural))
    determiner = before.pop(0) if before and before[0] in DETERMINERS_IN_ENGLISH else "-"
    determiner = {"an": "a", "these": "this"}.get(determiner, determiner)
    return Phrase(noun, determiner, "".join(before), plural=last == noun.english_plural, tail=tail)


def subject(text):
    """A pronoun or a noun phrase."""
    return next((p for p in PRONOUNS if p.english() == text), None) or phrase(text)


def clause(who, base, tense="present", *, object=None, time="", position="end", modal="", negated=False, **parts):
    """A clause from English texts; a part is a phrase, or "english/german" as it stands."""
    who = subject(who) if isinstance(who, str) else who
    verb = BE if base == "be" else next(v for v in VERB_ROWS if v.base == base)
    filled = {}
    for name, text in parts.items():
        match name:
            case "recipient":
                filled[name] = text, phrase(text).german("dative")
            case "along":
                filled[name] = prepositional("with", "mit", phrase(text), "dative")
            case "benefit":
                filled[name] = prepositional("for", "für", phrase(text), "accusative")
            case "place" | "goal":
                filled[name] = located(phrase(text), goal=name == "goal")
            case _:
                filled[name] = both(text)
    time = both(time) if time else ("", "")
    return Clause(who, verb, tense, modal, negated, time, position, phrase(object) if object else None, filled)


def tired(who, fixed="tired/müde", **kwargs):
    """Somebody is tired (or the like)."""
    return clause(who, "be", fixed=fixed, **kwargs)


FRONT = {"position": "front"}
STATEMENTS = [
    (clause("the man", "read", object="a book"), "The man is reading a book.", "Der Mann liest ein Buch."),
    (
        clause("the boy", "read", object="the newspaper", place="the garden"),
        "The boy is reading the newspaper in the garden.",
        "Der Junge liest die Zeitung im Garten.",
    ),
    (
        clause("an old woman", "read", object="an interesting letter", place="this library"),
        "An old woman is reading an interesting letter in this library.",
        "Eine alte Frau liest in dieser Bibliothek einen interessanten Brief.",
    ),
    (
        clause("I", "drink", "daily", object="cold milk", time="every day/jeden Tag", **FRONT),
        "Every day I drink cold milk.",
        "Jeden Tag trinke ich kalte Milch.",
    ),
    (
        clause("two girls", "eat", object="fresh apples", time="now/jetzt"),
        "Two girls are eating fresh apples now.",
        "Zwei Mädchen essen jetzt frische Äpfel.",
    ),
    (
        clause(
            "our neighbor",
            "cook",
            "daily",
            object="good fish",
            benefit="his sisters",
            time="often/oft",
            position="inner",
        ),
        "Our neighbor often cooks good fish for his sisters.",
        "Unser Nachbar kocht oft guten Fisch für seine Schwestern.",
    ),
    (
        clause("they", "buy", "past", object="two expensive chairs", time="yesterday/gestern", place="the city"),
        "They bought two expensive chairs in the city yesterday.",
        "Sie haben gestern in der Stadt zwei teure Stühle gekauft.",
    ),
    (
        clause(
            "the farmer",
            "sell",
            "past",
            object="his old horse",
            time="last week/letzte Woche",
            place="the market",
            **FRONT,
        ),
        "Last week the farmer sold his old horse at the market.",
        "Letzte Woche hat der Bauer sein altes Pferd auf dem Markt verkauft.",
    ),
    (
        clause("the doctor", "look for", object="her new jacket", negated=True),
        "The doctor is not looking for her new jacket.",
        "Der Arzt sucht ihre neue Jacke nicht.",
    ),
    (
        clause("my uncle", "need", object="a car", negated=True, time="today/heute", **FRONT),
        "Today my uncle does not need a car.",
        "Heute braucht mein Onkel kein Auto.",
    ),
    (
        clause("we", "visit", object="the young students", time="tomorrow/morgen", **FRONT),
        "Tomorrow we are visiting the young students.",
        "Morgen besuchen wir die jungen Studenten.",
    ),
    (
        clause("my brother", "invite", object="this friendly boy"),
        "My brother is inviting this friendly boy.",
        "Mein Bruder lädt diesen freundlichen Jungen ein.",
    ),
    (
        clause("I", "call", object="my old colleague", time="now/jetzt"),
        "I am calling my old colleague now.",
        "Ich rufe jetzt meinen alten Kollegen an.",
    ),
    (
        clause(
            "she", "pick up", "past", object="her grandmother", place="the station", time="this morning/heute Morgen"
        ),
        "She picked up her grandmother at the station this morning.",
        "Sie hat heute Morgen ihre Großmutter am Bahnhof abgeholt.",
    ),
    (
        clause("the little girl", "help", recipient="the old man", place="the kitchen"),
        "The little girl is helping the old man in the kitchen.",
        "Das kleine Mädchen hilft dem alten Mann in der Küche.",
    ),
    (
        clause("the teacher", "give", "past", recipient="the children", object="two books", time="yesterday/gestern"),
        "The teacher gave the children two books yesterday.",
        "Der Lehrer hat gestern den Kindern zwei Bücher gegeben.",
    ),
    (
        clause("the woman", "show", recipient="our friendly neighbors", object="the dog", modal="want to"),
        "The woman wants to show our friendly neighbors the dog.",
        "Die Frau will unseren freundlichen Nachbarn den Hund zeigen.",
    ),
    (
        clause("the student", "put", object="the lamp", goal="the small table"),
        "The student is putting the lamp on the small table.",
        "Der Student legt die Lampe auf den kleinen Tisch.",
    ),
    (
        clause("his sister", "tidy up", object="her small room", modal="have to", time="today/heute"),
        "His sister has to tidy up her small room today.",
        "Seine Schwester muss heute ihr kleines Zimmer aufräumen.",
    ),
    (
        clause("the girls", "open", object="this door", modal="can", negated=True),
        "The girls cannot open this door.",
        "Die Mädchen können diese Tür nicht aufmachen.",
    ),
    (
        clause("he", "wait", partner="for her brother/auf ihren Bruder", modal="have to", negated=True),
        "He does not have to wait for her brother.",
        "Er muss nicht auf ihren Bruder warten.",
    ),
    (
        clause(
            "the children",
            "play",
            "daily",
            along="the little dog",
            place="our garden",
            time="always/immer",
            position="inner",
        ),
        "The children always play in our garden with the little dog.",
        "Die Kinder spielen immer mit dem kleinen Hund in unserem Garten.",
    ),
    (
        clause("my aunt", "go", goal="the market", along="a colleague"),
        "My aunt is going to the market with a colleague.",
        "Meine Tante geht mit einem Kollegen zum Markt.",
    ),
    (
        clause("a small cat", "run", goal="the house"),
        "A small cat is running into the house.",
        "Eine kleine Katze läuft ins Haus.",
    ),
    (
        clause("the farmers", "drive", "past", goal="the beautiful city", time="this morning/heute Morgen", **FRONT),
        "This morning the farmers drove to the beautiful city.",
        "Heute Morgen sind die Bauern in die schöne Stadt gefahren.",
    ),
    (
        clause("our uncles", "arrive", "past", place="Vienna", time="yesterday/gestern"),
        "Our uncles arrived in Vienna yesterday.",
        "Unsere Onkel sind gestern in Wien angekommen.",
    ),
    (
        clause("I", "come", "past", fixed="home late/spät nach Hause", time="yesterday/gestern", **FRONT),
        "Yesterday I came home late.",
        "Gestern bin ich spät nach Hause gekommen.",
    ),
    (
        clause("her brother", "get up", "daily", fixed="early/früh", time="every day/jeden Tag"),
        "Her brother gets up early every day.",
        "Ihr Bruder steht jeden Tag früh auf.",
    ),
    (
        tired("the old doctors", "very hungry/sehr hungrig", tense="past", time="yesterday/gestern", negated=True),
        "The old doctors were not very hungry yesterday.",
        "Die alten Ärzte waren gestern nicht sehr hungrig.",
    ),
    (
        tired(phrase("the red hat", tail=located(phrase("my table"))), "new/neu"),
        "The red hat on my table is new.",
        "Der rote Hut auf meinem Tisch ist neu.",
    ),
]
SINGERS = with_relative_subject(phrase("the women"), clause("the women", "sing", modal="can"))
REPAIRER = with_relative_subject(phrase("the man"), clause("the man", "repair", object="our bicycle"))
BOUGHT = clause("my aunt", "buy", "past", benefit="the boy", time="last week/letzte Woche")
HAT = with_relative_object(BOUGHT, phrase("the blue hat"))
COMPLEX = [
    (
        reported(subject("I"), "know", clause("she", "see", "daily", object="a horse")),
        "I know that she sees a horse.",
        "Ich weiß, dass sie ein Pferd sieht.",
    ),
    (
        reported(subject("they"), "think", clause("he", "call", object="my sister", time="now/jetzt")),
        "They think that he is calling my sister now.",
        "Sie glauben, dass er jetzt meine Schwester anruft.",
    ),
    (
        reported(phrase("the child"), "say", clause("the doctors", "stay", "past", fixed="at home/zu Hause")),
        "The child says that the doctors stayed at home.",
        "Das Kind sagt, dass die Ärzte zu Hause geblieben sind.",
    ),
    (
        because(tired("our teacher"), clause("he", "work", "past", time="yesterday/gestern", place="Berlin")),
        "Our teacher is tired because he worked in Berlin yesterday.",
        "Unser Lehrer ist müde, weil er gestern in Berlin gearbeitet hat.",
    ),
    (
        because(clause("she", "dance", modal="want to", negated=True), tired("she", "sick/krank")),
        "She does not want to dance because she is sick.",
        "Sie will nicht tanzen, weil sie krank ist.",
    ),
    (
        when(both("it rains/es regnet"), clause("the girl", "tidy up", "daily", object="the kitchen"), first=True),
        "When it rains, the girl tidies up the kitchen.",
        "Wenn es regnet, räumt das Mädchen die Küche auf.",
    ),
    (
        when(both("it is cold/es kalt ist"), clause("we", "go", "daily", goal="the park", negated=True), first=False),
        "We do not go to the park when it is cold.",
        "Wir gehen nicht in den Park, wenn es kalt ist.",
    ),
    (
        said(tired(REPAIRER)),
        "The man who is repairing our bicycle is tired.",
        "Der Mann, der unser Fahrrad repariert, ist müde.",
    ),
    (
        with_verb(subject("we"), "know somebody", (SINGERS.english(), SINGERS.german("accusative"))),
        "We know the women who can sing.",
        "Wir kennen die Frauen, die singen können.",
    ),
    (
        said(replace(clause("he", "look for"), object=HAT)),
        "He is looking for the blue hat that my aunt bought for the boy last week.",
        "Er sucht den blauen Hut, den meine Tante letzte Woche für den Jungen gekauft hat.",
    ),
]
QUESTIONS = [
    (
        said(clause("the man", "feed", "past", object="the cats", time="yesterday/gestern"), question=True),
        "Did the man feed the cats yesterday?",
        "Hat der Mann gestern die Katzen gefüttert?",
    ),
    (
        said(clause("his uncle", "swim", modal="want to", place="the lake"), question=True),
        "Does his uncle want to swim in the lake?",
        "Will sein Onkel im See schwimmen?",
    ),
    (
        said(clause("I", "clean", object="the windows", modal="have to"), question=True, front=("why", "warum")),
        "Why do I have to clean the windows?",
        "Warum muss ich die Fenster putzen?",
    ),
    (
        said(clause("the boys", "sleep", negated=True), question=True, front=("why", "warum")),
        "Why are the boys not sleeping?",
        "Warum schlafen die Jungen nicht?",
    ),
    (
        said(clause("she", "talk", partner="to our teachers/mit unseren Lehrern", modal="can"), question=True),
        "Can she talk to our teachers?",
        "Kann sie mit unseren Lehrern sprechen?",
    ),
]
SENTENCES = [
    *((finish(said(made), "."), english, german) for made, english, german in STATEMENTS),
    *((finish(made, "."), english, german) for made, english, german in COMPLEX),
    *((finish(made, "?"), english, german) for made, english, german in QUESTIONS),
]


@pytest.mark.parametrize(("made", "english", "german"), SENTENCES, ids=[english for _, english, _ in SENTENCES])
def test_a_sentence_is_said_as_written_by_hand(made, english, german):
    assert made == (english, german)


def test_a_state_of_the_weather_or_of_somebody_is_a_subordinate_clause():
    assert german_subordinate(tired("his aunts", "thirsty/durstig")) == "seine Tanten durstig sind"
