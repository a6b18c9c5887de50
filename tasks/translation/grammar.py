"""The embedded data of the translation task: English-German sentence pairs from a small grammar.

The grammar builds an abstract `Clause` and renders it in English and in German. A pair is therefore correct by rule,
each English sentence has exactly one translation, and a held-out sentence combines known words in a new way.

Tenses: the English progressive (present or planned events) and simple present (habits and verbs of state) both become
the German present. The simple past becomes the German perfect; it always has a date, so that "read" is unambiguous.

Sentences: statements with times, modal verbs and negation; states of persons and things; questions; subordinate clauses
with dass, weil and wenn; relative clauses about a subject or an object.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from random import Random
from typing import TypeVar

from tasks.translation.lexicon import (
    ADJECTIVES,
    BE,
    DEFINITE,
    KINDS,
    NOTHING,
    NOUNS,
    PERSONS,
    PREPOSITIONS,
    PRONOUNS,
    VERB_ROWS,
    Both,
    Phrase,
    Pronoun,
    Subject,
    Verb,
    finite,
    join,
    prepositional,
)

Option = TypeVar("Option")

SIZES = {"train": 6000, "validation": 200, "test": 300}
WORDS = range(5, 17)
"""Allowed numbers of words per sentence, on both sides."""
SEEN = 5
"""Every word of a held-out sentence occurs at least this often in training."""
SEED = 2602


def grammar_splits() -> dict[str, list[tuple[str, str]]]:
    """Lists of (english, german) for 'train', 'validation' and 'test', the same in every process and on every machine.

    They have 6,000, 200 and 300 pairs. No sentence of either language occurs twice, within a split or across splits.
    Every word of a held-out sentence occurs in 'train' at least SEEN times.

    >>> splits = grammar_splits()
    >>> {name: len(pairs) for name, pairs in splits.items()}
    {'train': 6000, 'validation': 200, 'test': 300}
    """
    sampler = Sampler(SEED)
    taken: tuple[set[str], set[str]] = (set(), set())
    known: list[Counter[str]] = [Counter(), Counter()]
    splits: dict[str, list[tuple[str, str]]] = {}
    for name, size in SIZES.items():
        pairs = splits[name] = []
        while len(pairs) < size:
            pair = sampler.pair()
            fits = all(
                sentence not in before
                and len(sentence.split()) in WORDS
                and (name == "train" or all(count[word] >= SEEN for word in words_of(sentence)))
                for sentence, before, count in zip(pair, taken, known, strict=True)
            )
            if fits:
                pairs.append(pair)
                for sentence, before, count in zip(pair, taken, known, strict=True):
                    before.add(sentence)
                    if name == "train":
                        count.update(words_of(sentence))
    return splits


def words_of(sentence: str) -> list[str]:
    """Words of a sentence, without punctuation.

    >>> words_of("Ich weiß, dass es regnet.")
    ['Ich', 'weiß', 'dass', 'es', 'regnet']
    """
    return [word.strip(".,?") for word in sentence.split()]


def finish(pair: Both, sign: str) -> Both:
    """Capitalize the sentence and add its sign; a relative clause at the end loses its last comma."""
    english, german = (f"{text[0].upper()}{text[1:]}".rstrip(",") + sign for text in pair)
    return english, german


def both(text: str) -> Both:
    """Split "english/german"."""
    english, german = text.split("/")
    return english, german


# --- Clauses ---

MODALS = ("can", "have to", "want to")


@dataclass(frozen=True)
class Clause:
    """The content of a clause in no language; `parts` has the filled slots of the verb in both languages."""

    subject: Subject
    verb: Verb
    tense: str = "present"
    """present, daily (a habit) or past."""
    modal: str = ""
    negated: bool = False
    time: Both = NOTHING
    position: str = "end"
    """front, inner (English: before the verb) or end (of English)."""
    object: Phrase | None = None
    parts: dict[str, Both] = field(default_factory=dict)

    def part(self, language: int, *names: str) -> str:
        """Join the named parts that exist, in this order."""
        return join(*(self.parts.get(name, NOTHING)[language] for name in names))


def english_verb(clause: Clause, split: bool) -> tuple[str, str]:
    """Auxiliary and rest of the verb. With `split` there is always an auxiliary, "do" if no other."""
    verb, agreement = clause.verb, clause.subject.agreement
    past = clause.tense == "past"
    if verb is BE:
        return finite("was" if past else "be", agreement)[0], ""
    if clause.modal == "can":
        return "can", verb.base
    if clause.tense == "present" and not clause.modal and verb.progressive != "-":
        return finite("be", agreement)[0], verb.progressive
    base, form = verb.base, verb.past if past else verb.third if agreement == 1 else verb.base
    if clause.modal:
        base, form = f"{clause.modal} {base}", f"{finite(clause.modal, agreement)[0]} {base}"
    return ("did" if past else "does" if agreement == 1 else "do", base) if split else ("", form)


def english(clause: Clause, *, question: bool = False, front: str = "") -> str:
    """Render a clause in English: subject, auxiliary, not, often, verb, objects, place, time.

    A question swaps subject and auxiliary.
    """
    auxiliary, rest = english_verb(clause, split=clause.negated or question)
    subject = clause.subject.english()
    fronted, inner, end = (clause.time[0] * (clause.position == place) for place in ("front", "inner", "end"))
    return join(
        front or fronted,
        *((auxiliary, subject) if question else (subject, auxiliary)),
        "not" * clause.negated,
        inner,
        rest,
        clause.part(0, "fixed", "recipient"),
        clause.object.english() if clause.object else "",
        clause.part(0, "benefit", "partner", "goal", "place", "along"),
        end,
    ).replace("can not", "cannot")


def german_verb(clause: Clause) -> tuple[str, str, str]:
    """Finite verb, its separable prefix, and the nonfinite part: participle or infinitive."""
    verb, agreement = clause.verb, clause.subject.agreement
    if verb is BE:
        return finite("was" if clause.tense == "past" else "be", agreement)[1], "", ""
    if clause.modal:
        return finite(clause.modal, agreement)[1], "", verb.prefix + verb.infinitive
    if clause.tense == "past":  # the perfect: sein with verbs of motion and bleiben, otherwise haben
        return finite("be" if verb.auxiliary == "sein" else "haben", agreement)[1], "", verb.participle
    stem_with_e = verb.infinitive.removesuffix("n").removesuffix("e") + "e"
    return (stem_with_e, verb.german_third, verb.infinitive)[agreement], verb.prefix, ""


def german_middle(clause: Clause) -> str:
    """The part between the finite verb (or conjunction and subject) and the end of the verb.

    Known objects precede "nicht" and the place; new objects follow the place. A goal or fixed phrase comes last. With a
    new object, "nicht" becomes "kein".
    """
    time = clause.time[1] * (clause.position != "front")
    item, benefit, negation = clause.object, clause.part(1, "benefit"), "nicht" * clause.negated
    known, new = join(item.german("accusative") if item else "", benefit), ""
    if item and item.indefinite:
        known, new = "", join((replace(item, determiner="no") if negation else item).german("accusative"), benefit)
        negation = ""
    before, after = clause.part(1, "recipient"), clause.part(1, "along", "partner", "place")
    return join(time, before, known, negation, after, new, clause.part(1, "goal", "fixed"))


def german(clause: Clause, *, front: str = "", question: bool = False) -> str:
    """Render a clause in German as a main clause: the finite verb is second (in a question first), its prefix last.

    The subject follows the verb if something else is in front.
    """
    verb, prefix, end = german_verb(clause)
    fronted = front or clause.time[1] * (clause.position == "front")
    subject = clause.subject.german("nominative")
    order = (fronted, verb, subject) if fronted or question else (subject, verb)
    return join(*order, german_middle(clause), prefix, end)


def german_subordinate(clause: Clause, conjunction: str = "") -> str:
    """Render a clause in German after a conjunction or relative pronoun: the finite verb is last, with its prefix."""
    verb, prefix, end = german_verb(clause)
    return join(conjunction, clause.subject.german("nominative"), german_middle(clause), end, prefix + verb)


def with_relative_subject(head: Phrase, clause: Clause) -> Phrase:
    """ "the man who ...": a clause whose subject is `head`. The relative pronoun is the nominative article."""
    who = Pronoun(("who", DEFINITE["nominative"][head.gender]), head.agreement)
    inner = replace(clause, subject=who)
    return replace(head, tail=(english(inner), f", {german_subordinate(inner)},"))


def with_relative_object(clause: Clause, head: Phrase) -> Phrase:
    """ "the book that the man ...": a clause whose object is `head`. The relative pronoun is the accusative article."""
    inner, which = replace(clause, object=None), DEFINITE["accusative"][head.gender]
    return replace(head, tail=(f"that {english(inner)}", f", {german_subordinate(inner, which)},"))


def said(clause: Clause, *, question: bool = False, front: Both = NOTHING) -> Both:
    """A main clause in both languages."""
    return english(clause, question=question, front=front[0]), german(clause, question=question, front=front[1])


def with_verb(subject: Subject, word: str, rest: Both) -> Both:
    """Subject, a verb of FINITE, and the rest."""
    verb = finite(word, subject.agreement)
    return join(subject.english(), verb[0], rest[0]), join(subject.german("nominative"), verb[1], rest[1])


def reported(subject: Subject, word: str, clause: Clause) -> Both:
    """Something that somebody knows, says or thinks: a dass clause."""
    return with_verb(subject, word, (f"that {english(clause)}", f", {german_subordinate(clause, 'dass')}"))


def because(main: Clause, cause: Clause) -> Both:
    """A clause and its reason: a weil clause."""
    return f"{english(main)} because {english(cause)}", f"{german(main)}, {german_subordinate(cause, 'weil')}"


def when(condition: Both, main: Clause, first: bool) -> Both:
    """A condition: a wenn clause. If it is `first`, the finite verb of the main clause follows it."""
    if first:
        return said(main, front=(f"when {condition[0]},", f"wenn {condition[1]},"))
    return f"{english(main)} when {condition[0]}", f"{german(main)}, wenn {condition[1]}"


def located(phrase: Phrase, goal: bool = False) -> Both:
    """A place (dative) or a goal (accusative after in and auf, dative after zu and nach)."""
    prepositions = (PREPOSITIONS.get(phrase.noun.english) or PREPOSITIONS[phrase.noun.kind]).split()
    english, german = prepositions[2:] if goal else prepositions[:2]
    return prepositional(english, german, phrase, "accusative" if goal and german in ("in", "auf") else "dative")


# --- Combinations that make sense ---

TIMES = {
    "present": ("today/heute", "now/jetzt", "tomorrow/morgen"),
    "unplanned": ("today/heute", "now/jetzt"),
    "past": ("yesterday/gestern", "this morning/heute Morgen", "last week/letzte Woche"),
    "lately": ("yesterday/gestern", "this morning/heute Morgen"),
    "daily": ("every day/jeden Tag", "every evening/jeden Abend", "often/oft", "always/immer"),
    "mornings": ("every day/jeden Tag", "often/oft", "always/immer"),
}
TENSES = ("present", "present", "daily", "past", *MODALS)
KNOWN = "the this my his her our"
ANY = f"{KNOWN} a two -"
# Kind and Mädchen are neuter, so "er" and "sie" do not refer to them.
NATURAL = PERSONS.replace("child", "boy")

# Adjectives, verbs and nouns that make sense where they are used below.
FEELINGS = ("tired", "hungry", "thirsty", "happy", "sick")
CONSUMING = ("read", "eat", "drink", "cook", "buy")
PLEASING = ("visit", "invite", "call", "help", "arrive", "sing", "cook")
TIRING = ("work", "swim", "dance", "tidy up", "repair", "clean", "run", "get up")
DEMANDING = (*TIRING[:-1], "visit", "drive", "sing", "go", "play", "cook")
WANTED = ("read", "buy", "sell", "repair", "need")
USES = {"food": "eat", "meal": "eat", "drink": "drink"}  # "look for" goes with things of other kinds
LYING = ("book", "newspaper", "letter", "hat", "jacket", "lamp")
BAD_WEATHER = ("it rains/es regnet", "it snows/es schneit", "it is cold/es kalt ist")
GOOD_WEATHER = ("the sun shines/die Sonne scheint", "the weather is good/das Wetter gut ist", "it is hot/es heiß ist")
INDOORS = ("read", "eat", "drink", "cook", "tidy up", "stay")
OUTDOORS = ("play", "swim", "go")


class Sampler:
    """Draws sentences from the grammar; the same seed gives the same ones in every process and on every machine."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed).random  # Python guarantees the numbers of this method across versions
        self.used: set[str] = set()

    def chance(self, probability: float) -> bool:
        """True with this probability."""
        return self.random() < probability

    def pick(self, options: Sequence[Option]) -> Option:
        """One of the options, uniformly."""
        return options[int(self.random() * len(options))]

    def pair(self) -> Both:
        """Any sentence of the grammar."""
        self.used.clear()
        kinds = [self.statement] * 4 + [self.state, self.that, self.because, self.when, self.relative] * 2
        if self.chance(0.1):
            return finish(self.question(), "?")
        return finish(self.pick(kinds)(), ".")

    def phrase(self, kinds: str, determiners: str = ANY) -> Phrase:
        """A noun phrase with a noun that is new in the sentence."""
        options = kinds.split(",")
        noun = self.pick(
            [n for n in NOUNS if n.english not in self.used and (n.kind in options or n.english in options)]
        )
        self.used.add(noun.english)
        suitable, adjectives = (column.split() for column in KINDS[noun.kind])
        determiner = self.pick([d for d in suitable if d in determiners.split()])
        plural = noun.english_plural != "-" and determiner != "a" and (determiner in ("two", "-") or self.chance(0.3))
        return Phrase(noun, determiner, self.pick(adjectives) if adjectives and self.chance(0.4) else "", plural)

    def somebody(self, kinds: str = PERSONS, determiners: str = KNOWN) -> Subject:
        """A subject: a pronoun or a noun phrase."""
        return self.pick(PRONOUNS) if self.chance(0.3) else self.phrase(kinds, determiners)

    def place(self, kinds: str, goal: bool = False) -> Both:
        """A random place or goal."""
        return located(replace(self.phrase(kinds, f"{KNOWN} a --"), plural=False), goal)

    def clause(
        self,
        tense: str,
        verbs: Sequence[str] = (),
        subject: Subject | None = None,
        *,
        times: str | None = None,
        front: bool = False,
        negated: bool = False,
        known: bool = True,
        brief: bool = False,
    ) -> Clause:
        """A random clause.

        Args:
            tense: a tense or a modal verb.
            verbs: verbs to choose from; by default all.
            subject: its subject; by default a random one.
            times: key of TIMES, by default that of the tense; "" for no time.
            front: allow the time in front.
            negated: negate the clause.
            known: use a definite subject.
            brief: leave out places and company.
        """
        modal, tense = (tense, "present") if tense in MODALS else ("", tense)
        kind = subject.noun.kind if isinstance(subject, Phrase) else ""
        rows = [
            v for v in VERB_ROWS if (not verbs or v.base in verbs) and (not kind or kind in v.slots.get("by", PERSONS))
        ]
        rows = [
            v for v in rows if not ((tense == "daily" and "daily" not in v.slots) or (modal and "nomodal" in v.slots))
        ]
        verb = self.pick(rows)
        subject = subject or self.somebody(verb.slots.get("by", PERSONS), KNOWN if known else ANY)
        item, parts = self.fill(verb, tense, negated, brief)
        clause = Clause(subject, verb, tense, modal, negated, object=item, parts=parts)
        animal = isinstance(subject, Phrase) and subject.noun.kind == "animal"
        if times is None:
            unplanned = tense == "present" and (animal or "unplanned" in verb.slots)
            times = "unplanned" if unplanned else verb.slots["daily"] or tense if tense == "daily" else tense
        return self.dated(clause, times, front) if times and (tense != "present" or self.chance(0.4)) else clause

    def dated(self, clause: Clause, times: str, front: bool) -> Clause:
        """Add a time. In a negated clause it is in front, since it would compete with "nicht" for its place."""
        time = both(self.pick(TIMES[times]))
        inner = time[0] in ("often", "always")
        position = "inner" if inner else "front" if front and (clause.negated or self.chance(0.5)) else "end"
        return replace(clause, time=time, position=position)

    def fill(self, verb: Verb, tense: str, negated: bool, brief: bool) -> tuple[Phrase | None, dict[str, Both]]:
        """Object and other parts of a clause."""
        slots, item, parts = verb.slots, None, {}
        if kinds := slots.get("object"):
            # A habit concerns no definite object, and the negation of "two apples" is ambiguous.
            habit = tense == "daily" and verb.base in CONSUMING
            item = self.phrase(kinds, "a -" if habit else ANY.replace("two", "") if negated else ANY)
        if kinds := slots.get("recipient"):
            phrase = self.phrase(kinds, KNOWN if negated else ANY)
            parts["recipient"] = phrase.english(), phrase.german("dative")
        if kinds := slots.get("partner"):
            english, german, case = slots["via"].split("/")
            parts["partner"] = prepositional(english, german, self.phrase(kinds, KNOWN), case)
        if kinds := slots.get("goal"):
            parts["goal"] = self.place(kinds, goal=True)
        if fixed := slots.get("fixed"):
            parts["fixed"] = both(fixed.replace("_", " "))
        # "not" before a place would negate only the place, so a negated clause with an object has no place.
        extra = not brief and not (negated and (item or "recipient" in parts))
        if "place" in slots and extra and self.chance(0.4):
            parts["place"] = self.place(slots["place"])
        if "along" in slots and extra and self.chance(0.3):
            parts["along"] = prepositional("with", "mit", self.phrase(slots["along"], KNOWN), "dative")
        if "benefit" in slots and extra and self.chance(0.3):
            parts["benefit"] = prepositional("for", "für", self.phrase(PERSONS, KNOWN), "accusative")
        return item, parts

    def being(self, subject: Subject, adjectives: Sequence[str], tense: str = "present") -> Clause:
        """A subject has a property, or has it very much."""
        adjective, very = self.pick(adjectives), self.chance(0.3)
        fixed = ("very " * very + adjective, "sehr " * very + ADJECTIVES[adjective])
        return Clause(subject, BE, tense, parts={"fixed": fixed})

    def quality(self, subject: Phrase) -> Clause:
        """A thing has a property. The attribute of the thing is dropped, so that no new book is old."""
        tail = subject.tail
        if subject.noun.english in LYING and tail == NOTHING and self.chance(0.5):
            tail = self.place("table")
        adjectives = [a for a in KINDS[subject.noun.kind][1].split() if a not in ("red", "blue")]
        return self.being(replace(subject, adjective="", tail=tail), adjectives)

    # One method per kind of sentence. Each returns both languages, without capital and period.

    def statement(self) -> Both:
        """A main clause."""
        negated = self.chance(0.2)
        tense = self.pick([t for t in TENSES if not (negated and t == "daily")])
        return said(self.clause(tense, front=True, negated=negated, known=negated))

    def state(self) -> Both:
        """The state of a thing or a person."""
        if self.chance(0.4):
            clause = self.quality(self.phrase("text,goods,animal,home", KNOWN))
            return said(replace(clause, negated=self.chance(0.2)))
        tense, times = self.pick((("present", "unplanned"), ("past", "lately")))
        clause = self.being(self.somebody(), FEELINGS, tense)
        return said(self.dated(replace(clause, negated=self.chance(0.2)), times, front=True))

    def question(self) -> Both:
        """A yes-no question or a why question."""
        if self.chance(0.5):
            return said(self.clause(self.pick(("past", "past", *MODALS))), question=True)
        if self.chance(0.3):
            clause = self.clause(self.pick(("present", *MODALS)), times="", negated=True)
        else:
            clause = self.clause(self.pick(TENSES))
        return said(clause, question=True, front=("why", "warum"))

    def that(self) -> Both:
        """Something that somebody knows, says or thinks: dass."""
        return reported(
            self.somebody(), self.pick(("know", "say", "think")), self.clause(self.pick(TENSES), known=False)
        )

    def because(self) -> Both:
        """A reason: weil."""
        subject, reason = self.somebody(NATURAL), self.pick(("pleased", "tired", "unable"))
        if reason == "pleased":
            main = self.being(subject, ["happy"])
            cause = self.clause(self.pick(("present", "past", "can", "want to")), PLEASING)
        elif reason == "tired":
            main, cause = self.being(subject, ["tired"]), self.clause("past", TIRING, subject.pronoun, times="lately")
        else:
            main = self.clause(self.pick(("can", "want to")), DEMANDING, subject, times="", negated=True)
            cause = self.being(subject.pronoun, ["tired", "sick"])
        return because(main, cause)

    def when(self) -> Both:
        """A habit in some weather, or when hungry or thirsty: wenn, before or after the main clause."""
        first = self.chance(0.5)
        if self.chance(0.3):
            subject = self.somebody(NATURAL)
            feeling, verb = self.pick((("hungry", "eat"), ("thirsty", "drink")))
            who, whom = (subject, subject.pronoun) if first else (subject.pronoun, subject)
            state = self.being(who, [feeling])
            condition = english(state), german_subordinate(state)
            main = self.clause("daily", [verb], whom, times="")
        else:
            bad = self.chance(0.6)
            negated = bad and self.chance(0.4)
            condition = both(self.pick(BAD_WEATHER if bad else GOOD_WEATHER))
            verbs = INDOORS if bad and not negated else OUTDOORS
            main = self.clause("daily", verbs, times="", negated=negated, brief=verbs is INDOORS)
        return when(condition, main, first)

    def relative(self) -> Both:
        """A relative clause whose head is its subject (who) or its object (that)."""
        tense = self.pick(("present", "past", "past", "have to", "want to"))
        times = "past" if tense == "past" else ""
        if self.chance(0.5):
            head = self.phrase("adult,child", "the")
            head = with_relative_subject(head, self.clause(tense, (), head, times=times))
            if self.chance(0.5):
                return said(self.being(head, FEELINGS))
            return with_verb(self.somebody(), "know somebody", (head.english(), head.german("accusative")))
        clause = self.clause(tense, WANTED, times=times)
        assert clause.object
        head = with_relative_object(clause, replace(clause.object, determiner="the"))
        if self.chance(0.5):
            return said(self.quality(head))
        verb = next(v for v in VERB_ROWS if v.base == USES.get(head.noun.kind, "look for"))
        return said(Clause(self.somebody(), verb, object=head))
