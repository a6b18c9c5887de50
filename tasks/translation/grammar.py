"""Embedded English-German sentence pairs from a small grammar, the data of the translation demo.

German order and agreement differ from English: the finite verb is second, first in questions and last in subordinate
clauses; prefixes, participles and infinitives close the clause; articles, adjectives and pronouns follow gender,
number and case.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import TypeVar

Option = TypeVar("Option")
Both = tuple[str, str]
"""A phrase in English and in German."""

SIZES = {"train": 6000, "validation": 200, "test": 300}
SEED = 2602

# Kind: English singular and plural, German singular and plural, gender.
NOUNS = """
person: man men Mann Männer m, woman women Frau Frauen f, doctor doctors Arzt Ärzte m, girl girls Mädchen Mädchen n
person: grandmother grandmothers Großmutter Großmütter f, uncle uncles Onkel Onkel m, sister sisters Schwester Schwestern f
person: brother brothers Bruder Brüder m, teacher teachers Lehrer Lehrer m, child children Kind Kinder n
animal: dog dogs Hund Hunde m, cat cats Katze Katzen f, horse horses Pferd Pferde n
text: book books Buch Bücher n, newspaper newspapers Zeitung Zeitungen f, letter letters Brief Briefe m
thing: car cars Auto Autos n, hat hats Hut Hüte m, lamp lamps Lampe Lampen f, chair chairs Stuhl Stühle m
thing: bicycle bicycles Fahrrad Fahrräder n, jacket jackets Jacke Jacken f, table tables Tisch Tische m
food: apple apples Apfel Äpfel m, egg eggs Ei Eier n, tomato tomatoes Tomate Tomaten f, cake cakes Kuchen Kuchen m
""".strip()  # noqa: E501

# English base, third person and past | German infinitive, third person, participle and auxiliary | complements.
VERBS = """
read reads read | lesen liest gelesen haben | object=text place
write writes wrote | schreiben schreibt geschrieben haben | recipient=person object=text
buy buys bought | kaufen kauft gekauft haben | object=thing,text,food,animal place
sell sells sold | verkaufen verkauft verkauft haben | object=thing,animal place
eat eats ate | essen isst gegessen haben | object=food place
look_for looks_for looked_for | suchen sucht gesucht haben | object=thing,text,animal,person place
see sees saw | sehen sieht gesehen haben | object=person,animal,thing place
visit visits visited | besuchen besucht besucht haben | object=person with
invite invites invited | ein|laden lädt eingeladen haben | object=person
call calls called | an|rufen ruft angerufen haben | object=person
pick_up picks_up picked_up | ab|holen holt abgeholt haben | object=person,thing
help helps helped | helfen hilft geholfen haben | recipient=person place
thank thanks thanked | danken dankt gedankt haben | recipient=person
give gives gave | geben gibt gegeben haben | recipient=person object=thing,text,food
show shows showed | zeigen zeigt gezeigt haben | recipient=person object=thing,text,animal
play plays played | spielen spielt gespielt haben | with place
sing sings sang | singen singt gesungen haben | with place
work works worked | arbeiten arbeitet gearbeitet haben | with place
swim swims swam | schwimmen schwimmt geschwommen sein | with
go goes went | gehen geht gegangen sein | with goal
drive drives drove | fahren fährt gefahren sein | with goal
arrive arrives arrived | an|kommen kommt angekommen sein | place
get_up gets_up got_up | auf|stehen steht aufgestanden sein | early
""".strip()

ADJECTIVES = dict(
    zip(
        ["old", "young", "big", "small", "new", "beautiful"],
        ["alt", "jung", "groß", "klein", "neu", "schön"],
        strict=True,
    )
)
FEELINGS = ("tired/müde", "hungry/hungrig", "happy/glücklich", "sick/krank", "thirsty/durstig")
PLACES = ("in the garden/im Garten", "in the city/in der Stadt", "at the station/am Bahnhof", "in Berlin/in Berlin")
GOALS = ("to Berlin/nach Berlin", "to the city/in die Stadt", "to the station/zum Bahnhof", "home/nach Hause")
PRESENT = ("today/heute", "now/jetzt", "every day/jeden Tag", "on Monday/am Montag")
PAST = ("yesterday/gestern", "last week/letzte Woche", "this morning/heute Morgen")
# English third person, German forms.
MODALS = {
    "can": ("can", "kann kann können"),
    "have to": ("has to", "muss muss müssen"),
    "want to": ("wants to", "will will wollen"),
}

# Endings by case for masculine, feminine, neuter and plural.
DEFINITE = {"nominative": "er ie as ie", "accusative": "en ie as ie", "dative": "em er em en"}
STRONG = {"nominative": "er e es e", "accusative": "en e es e", "dative": "em er em en"}
MIXED = {"nominative": "- e - e", "accusative": "en e - e", "dative": "em er em en"}
DETERMINERS = {"the": ("d", DEFINITE), "this": ("dies", STRONG), "a": ("ein", MIXED), "my": ("mein", MIXED),
               "our": ("unser", MIXED), "his": ("sein", MIXED), "her": ("ihr", MIXED)}  # fmt: skip
KNOWN = ("the", "this", "my", "our", "his", "her")


def grammar_splits() -> dict[str, list[Both]]:
    """Return lists of (English, German) for 'train', 'validation' and 'test', the same on every machine.

    No sentence of either language occurs twice, within a split or across splits.

    >>> {name: len(pairs) for name, pairs in grammar_splits().items()}
    {'train': 6000, 'validation': 200, 'test': 300}
    """
    sampler, taken = Sampler(SEED), set[str]()
    splits: dict[str, list[Both]] = {}
    for name, size in SIZES.items():
        splits[name] = []
        while len(splits[name]) < size:
            pair = sampler.pair()
            if taken.isdisjoint(pair):
                splits[name].append(pair)
                taken.update(pair)
    return splits


@dataclass(frozen=True)
class Subject:
    """A subject in the nominative; `form` selects the verb: 0 for "I", 1 for the third person, 2 for plurals."""

    english: str
    german: str
    form: int
    pronoun: Both


PRONOUNS = [
    Subject(english, german, form, (english, german))
    for english, german, form in (("I", "ich", 0), ("he", "er", 1), ("she", "sie", 1), ("we", "wir", 2))
]


@dataclass(frozen=True)
class Clause:
    """The words of a clause in both languages, in no order."""

    subject: Subject
    auxiliary: str
    """English auxiliary, "" if the main verb stands alone."""
    verb: str
    """English main verb, or a property."""
    finite: str
    """German finite verb."""
    end: str
    """German separable prefix, participle, infinitive or property."""
    middle: Both = ("", "")
    """Complements, negation included in German."""
    time: Both = ("", "")
    negated: bool = False
    separable: bool = False
    """Whether `end` is a prefix, which the finite verb takes back where it is last."""

    def english(self, fronted: bool = False, question: bool = False) -> str:
        """The English clause, with the time in front if `fronted`."""
        subject = (self.auxiliary, self.subject.english) if question else (self.subject.english, self.auxiliary)
        rest = ("not" * self.negated, self.verb, self.middle[0])
        words = (self.time[0], *subject, *rest) if fronted else (*subject, *rest, self.time[0])
        return join(*words).replace("can not", "cannot")

    def german(self, fronted: bool = False, question: bool = False) -> str:
        """The German main clause: the finite verb is second, or first in a question."""
        time, subject = self.time[1], self.subject.german
        if question:
            order = (self.finite, subject, time)
        else:
            order = (time, self.finite, subject) if fronted else (subject, self.finite, time)
        return join(*order, self.middle[1], self.end)

    def subordinate(self) -> str:
        """The German clause after a conjunction: the finite verb is last."""
        last = self.end + self.finite if self.separable else join(self.end, self.finite)
        return join(self.subject.german, self.time[1], self.middle[1], last)


class Sampler:
    """Draws sentence pairs from the grammar; the same seed gives the same ones on every machine."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed).random  # Python guarantees the numbers of this method across versions
        self.nouns = [(row.split(": ")[0], *noun.split()) for row in NOUNS.splitlines() for noun in
                      row.split(": ")[1].split(", ")]  # fmt: skip

    def chance(self, probability: float) -> bool:
        """True with this probability."""
        return self.random() < probability

    def pick(self, options: Sequence[Option]) -> Option:
        """One of the options, uniformly."""
        return options[int(self.random() * len(options))]

    def pair(self) -> Both:
        """Any sentence: statement, question, that or because clause, or a relative clause."""
        kind, clause = self.pick(("statement", "statement", "question", "that", "because", "relative")), self.clause
        if kind == "statement":
            said = clause()
            fronted = said.time[0] != "" and self.chance(0.5)
            return sentence(said.english(fronted), said.german(fronted))
        if kind == "question":
            asked = clause(question=True)
            return sentence(asked.english(question=True), asked.german(question=True), "?")
        if kind == "that":
            thinks, glaubt = self.pick((("I know", "ich weiß"), ("she says", "sie sagt"), ("he thinks", "er glaubt")))
            said = clause()
            return sentence(f"{thinks} that {said.english()}", f"{glaubt}, dass {said.subordinate()}")
        if kind == "because":
            said = clause()
            english, german = said.subject.pronoun
            cause = self.feeling(replace(said.subject, english=english, german=german))
            english, german = (
                f"{said.english()} because {cause.english()}",
                f"{said.german()}, weil {cause.subordinate()}",
            )
            return sentence(english, german)
        who, article = self.noun("person", ("the",))
        inner = clause(replace(who, english="who", german=article))
        english, german = f"{who.english} {inner.english()}", f"{who.german}, {inner.subordinate()},"
        said = self.feeling(replace(who, english=english, german=german))
        return sentence(said.english(), said.german())

    def noun(self, kinds: str, determiners: Sequence[str], case: str = "nominative") -> tuple[Subject, str]:
        """A noun phrase in this case, and the article of its noun."""
        _, english, many, german, viele, gender = self.pick([n for n in self.nouns if n[0] in kinds.split(",")])
        determiner = self.pick(determiners)
        plural = determiner != "a" and self.chance(0.25)
        column = 3 if plural else "mfn".index(gender)
        stem, endings = DETERMINERS[determiner]
        ending = endings[case].split()[column].replace("-", "")
        adjective = self.pick(list(ADJECTIVES)) if self.chance(0.3) else ""
        if plural or case == "dative":
            weak = "en"
        elif endings is MIXED and not ending:
            weak = "er" if gender == "m" else "es"
        else:
            weak = "en" if case == "accusative" and gender == "m" else "e"
        word = viele if plural else german
        word += "n" * (plural and case == "dative" and word[-1] not in "ns")
        shown = {"this": "these"}.get(determiner, determiner) if plural else determiner
        phrase = join(shown, adjective, many if plural else english)
        if phrase.startswith(("a a", "a e", "a o")):
            phrase = f"an{phrase[1:]}"
        attribute = ADJECTIVES[adjective] + weak if adjective else ""
        pronoun = ("they", "sie") if plural else {"m": ("he", "er"), "f": ("she", "sie"), "n": ("it", "es")}[gender]
        subject = Subject(phrase, join(stem + ending, attribute, word), 2 if plural else 1, pronoun)
        return subject, "d" + DEFINITE[case].split()[column]

    def feeling(self, subject: Subject) -> Clause:
        """Somebody is, or was, tired."""
        past = self.chance(0.3)
        english, german = ("was was were", "war war waren") if past else ("am is are", "bin ist sind")
        adjective = both(self.pick(FEELINGS))
        very = self.chance(0.3)
        return Clause(subject, english.split()[subject.form], "very " * very + adjective[0],
                      german.split()[subject.form], "sehr " * very + adjective[1])  # fmt: skip

    def clause(self, subject: Subject | None = None, question: bool = False) -> Clause:
        """A clause with a verb of VERBS, in the present, the past or with a modal verb."""
        if subject is None:
            subject = self.pick(PRONOUNS) if self.chance(0.35) else self.noun("person", KNOWN)[0]
        english, german, slots = (cell.split() for cell in self.pick(VERBS.splitlines()).split(" | "))
        base, third, past = (form.replace("_", " ") for form in english)
        parts, german_third, participle, auxiliary = german
        prefix, _, infinitive = parts.rpartition("|")
        tense = self.pick(("present", "past", *MODALS))
        negated = not question and self.chance(0.2)
        middle = self.complements(dict(slot.partition("=")[::2] for slot in slots), negated)
        time = both(self.pick(PAST if tense == "past" else PRESENT)) if self.chance(0.6) else ("", "")
        if tense in MODALS:
            third_modal, german_modal = MODALS[tense]
            base, third = f"{tense} {base}", f"{third_modal} {base}"
        if tense == "can":
            helping, verb = base.split(" ", 1)
        elif negated or question:
            helping, verb = "did" if tense == "past" else "does" if subject.form == 1 else "do", base
        else:
            helping, verb = "", past if tense == "past" else third if subject.form == 1 else base
        if tense == "past":
            forms, end = {"haben": "habe hat haben", "sein": "bin ist sind"}[auxiliary], participle
        elif tense == "present":
            forms, end = f"{infinitive.removesuffix('n').removesuffix('e')}e {german_third} {infinitive}", prefix
        else:
            forms, end = german_modal, prefix + infinitive
        finite, separable = forms.split()[subject.form], tense == "present"
        return Clause(subject, helping, verb, finite, end, middle, time, negated, separable)

    def complements(self, slots: dict[str, str], negated: bool) -> Both:
        """Recipient, object, company, place and goal; German "nicht" follows the objects."""
        determiners = KNOWN if negated else (*KNOWN, "a", "a", "a")
        before: list[Both] = []
        for slot, case in (("recipient", "dative"), ("object", "accusative")):
            if slot in slots:
                phrase = self.noun(slots[slot], determiners, case)[0]
                before.append((phrase.english, phrase.german))
        after: list[Both] = []
        if "with" in slots and self.chance(0.5):
            friend = self.noun("person", KNOWN, "dative")[0]
            after.append((f"with {friend.english}", f"mit {friend.german}"))
        # "nicht" before a place would negate the place alone.
        if "place" in slots and not (negated and before) and self.chance(0.5):
            after.append(both(self.pick(PLACES)))
        if "goal" in slots:
            after.append(both(self.pick(GOALS)))
        if "early" in slots:
            after.append(("early", "früh"))
        english = [phrase[0] for phrase in before + ([*after[1:], after[0]] if "goal" in slots else after)]
        german = [phrase[1] for phrase in before] + ["nicht" * negated] + [phrase[1] for phrase in after]
        return join(*english), join(*german)


def join(*words: str) -> str:
    """Join the words that are not empty."""
    return " ".join(filter(None, words))


def both(text: str) -> Both:
    """Split "English/German"."""
    english, german = text.split("/")
    return english, german


def sentence(english: str, german: str, sign: str = ".") -> Both:
    """Capitalize both, and add the sign; a relative clause at the end loses its comma."""
    english, german = (f"{text[0].upper()}{text[1:].rstrip(',')}{sign}" for text in (english, german))
    return english, german
