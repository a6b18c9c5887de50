"""The words of the English-German grammar in tables, and how noun phrases and finite verbs inflect.

`grammar.py` chooses and orders the words.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Noun:
    """A noun. "-" for its plural means that it is always singular.

    The gender is m, f, n, or w for weak masculine nouns, which have the form of their plural except in the nominative.
    """

    kind: str
    english: str
    english_plural: str
    german: str
    german_plural: str
    gender: str


@dataclass(frozen=True)
class Verb:
    """A verb and its slots.

    "-" for the progressive marks a verb of state. The infinitive is without the separable prefix, which may be empty.
    The auxiliary is the one of the perfect.
    """

    base: str
    third: str
    progressive: str
    past: str
    prefix: str
    infinitive: str
    german_third: str
    participle: str
    auxiliary: str
    slots: dict[str, str]


# Kind: determiners (listed twice to be drawn twice as often; "-" is none, "--" none before names); suitable adjectives.
KINDS = {
    "adult": ("the the the a this two", "old young tall friendly"),
    "child": ("the the the a this two", "little tall friendly"),
    "elder": ("my his her our", "old friendly"),
    "sibling": ("my his her our", "little tall friendly"),
    "animal": ("the the a two my his her our", "old young big small"),
    "text": ("the the a a this two - my his her", "new old interesting"),
    "goods": ("the the a a this two - my his her our", "new old expensive beautiful red blue"),
    "food": ("the a a two - -", "fresh big small"),
    "meal": ("the - -", "fresh good"),
    "drink": ("the - -", "cold hot"),
    "part": ("the the this two", "big small old new"),
    "indoors": ("the the my his her our", "big small"),
    "home": ("the the the my his her our", "big small beautiful old"),
    "place": ("the the the the a this", "big small beautiful"),
    "town": ("--", ""),
}

# Kind: nouns, each with its English plural, its German forms and its gender.
NOUN_ROWS = """
adult: man men Mann Männer m, woman women Frau Frauen f, doctor doctors Arzt Ärzte m
adult: farmer farmers Bauer Bauern w, student students Student Studenten w
child: child children Kind Kinder n, boy boys Junge Jungen w, girl girls Mädchen Mädchen n
elder: grandmother - Großmutter - f, uncle uncles Onkel Onkel m, aunt aunts Tante Tanten f
elder: teacher teachers Lehrer Lehrer m, neighbor neighbors Nachbar Nachbarn w
elder: colleague colleagues Kollege Kollegen w
sibling: brother brothers Bruder Brüder m, sister sisters Schwester Schwestern f
animal: dog dogs Hund Hunde m, cat cats Katze Katzen f, horse horses Pferd Pferde n
text: book books Buch Bücher n, newspaper newspapers Zeitung Zeitungen f, letter letters Brief Briefe m
goods: car cars Auto Autos n, bicycle bicycles Fahrrad Fahrräder n, hat hats Hut Hüte m
goods: jacket jackets Jacke Jacken f, lamp lamps Lampe Lampen f, chair chairs Stuhl Stühle m
goods: table tables Tisch Tische m
food: apple apples Apfel Äpfel m, egg eggs Ei Eier n, tomato tomatoes Tomate Tomaten f
meal: bread - Brot - n, soup - Suppe - f, fish - Fisch - m
drink: milk - Milch - f, water - Wasser - n, tea - Tee - m
part: window windows Fenster Fenster n, door doors Tür Türen f
indoors: kitchen - Küche - f, room - Zimmer - n
home: house - Haus - n, garden - Garten - m
place: park - Park - m, forest - Wald - m, library - Bibliothek - f, city - Stadt - f, station - Bahnhof - m
place: market - Markt - m, lake - See - m
town: Berlin - Berlin - n, Hamburg - Hamburg - n, Vienna - Wien - n
"""
NOUNS = [
    Noun(kind, *noun.split())
    for kind, nouns in (row.split(": ") for row in NOUN_ROWS.strip().splitlines())
    for noun in nouns.split(", ")
]

# Noun or kind: English and German preposition for a place (dative), then for a goal.
PREPOSITIONS = {
    "indoors": "in in into in",
    "home": "in in into in",
    "town": "in in to nach",
    "park": "in in to in",
    "forest": "in in into in",
    "library": "in in to in",
    "city": "in in to in",
    "station": "at an to zu",
    "market": "at auf to zu",
    "lake": "in in to zu",
    "table": "on auf on auf",
}

# English/German as used after "is". As attributes they take endings; "teuer" drops an e first.
ADJECTIVES = dict(
    pair.split("/")
    for row in """
old/alt young/jung tall/groß friendly/freundlich little/klein big/groß small/klein new/neu fresh/frisch good/gut
interesting/interessant expensive/teuer beautiful/schön red/rot blue/blau cold/kalt hot/heiß
tired/müde hungry/hungrig thirsty/durstig happy/glücklich sick/krank
""".splitlines()
    for pair in row.split()
)

PERSONS = "adult,child,elder,sibling"

# English forms | German forms, with a bar after a separable prefix | slots, filled from kinds or single nouns:
# by (subjects; default: persons), object (accusative), recipient (dative), partner (with the preposition and case in
# via), place, goal, along (mit), benefit (für), fixed; and flags: daily (possible as a habit, perhaps only at certain
# times), nomodal (no modal verb), unplanned (not tomorrow). A verb may have several rows; _ is a space.
VERBS = """
read reads reading read | lesen liest gelesen haben | object=text place=garden,park,library daily
eat eats eating ate | essen isst gegessen haben | object=food,meal place=kitchen,garden daily
drink drinks drinking drank | trinken trinkt getrunken haben | object=drink place=kitchen,garden daily
cook cooks cooking cooked | kochen kocht gekocht haben | object=soup,fish,egg benefit daily
buy buys buying bought | kaufen kauft gekauft haben | object=food,bread,fish,milk place=market benefit daily
buy buys buying bought | kaufen kauft gekauft haben | object=goods,book,newspaper place=city benefit
sell sells selling sold | verkaufen verkauft verkauft haben | object=goods,animal place=market
look_for looks_for looking_for looked_for | suchen sucht gesucht haben | object=goods,text,animal unplanned
see sees - saw | sehen sieht gesehen haben | object=person,animal nomodal unplanned
need needs - needed | brauchen braucht gebraucht haben | object=goods nomodal unplanned
visit visits visiting visited | besuchen besucht besucht haben | object=person daily
invite invites inviting invited | ein|laden lädt eingeladen haben | object=person
call calls calling called | an|rufen ruft angerufen haben | object=person daily
pick_up picks_up picking_up picked_up | ab|holen holt abgeholt haben | object=person place=station
help helps helping helped | helfen hilft geholfen haben | recipient=person place=garden,kitchen daily
repair repairs repairing repaired | reparieren repariert repariert haben | object=car,bicycle,lamp,chair,table
clean cleans cleaning cleaned | putzen putzt geputzt haben | object=part,kitchen,car,bicycle daily
open opens opening opened | auf|machen macht aufgemacht haben | object=part daily
tidy_up tidies_up tidying_up tidied_up | auf|räumen räumt aufgeräumt haben | object=indoors daily
feed feeds feeding fed | füttern füttert gefüttert haben | object=animal place=garden daily
give gives giving gave | geben gibt gegeben haben | recipient=person object=text,hat,jacket,lamp,apple
show shows showing showed | zeigen zeigt gezeigt haben | recipient=person object=text,goods,animal
put puts putting put | legen legt gelegt haben | object=text,hat,jacket,apple goal=table
sleep sleeps sleeping slept | schlafen schläft geschlafen haben | by=person,animal place=house,room daily unplanned
work works working worked | arbeiten arbeitet gearbeitet haben | by=adult,elder place=garden,library,city,town daily
play plays playing played | spielen spielt gespielt haben | by=child,sibling place=garden,park along=person,dog daily
sing sings singing sang | singen singt gesungen haben | place=garden,park,kitchen along=person daily
dance dances dancing danced | tanzen tanzt getanzt haben | place=garden,park,kitchen along=person daily
wait waits waiting waited | warten wartet gewartet haben | partner=person via=for/auf/accusative
talk talks talking talked | sprechen spricht gesprochen haben | partner=person via=to/mit/dative place=park,garden daily
swim swims swimming swam | schwimmen schwimmt geschwommen sein | place=lake along=person,dog daily
go goes going went | gehen geht gegangen sein | goal=park,forest,lake,market along=person,dog daily
run runs running ran | laufen läuft gelaufen sein | by=person,animal goal=forest,garden,house,lake daily
drive drives driving drove | fahren fährt gefahren sein | by=adult,elder goal=city,library,station,town along=person
arrive arrives arriving arrived | an|kommen kommt angekommen sein | place=station,town nomodal
come comes coming came | kommen kommt gekommen sein | fixed=home_late/spät_nach_Hause daily
stay stays staying stayed | bleiben bleibt geblieben sein | fixed=at_home/zu_Hause daily
get_up gets_up getting_up got_up | auf|stehen steht aufgestanden sein | fixed=early/früh daily=mornings
""".strip()


def read_verb(row: str) -> Verb:
    """Read a row of the table of verbs."""
    english, german, slots = (cell.split() for cell in row.replace("person", PERSONS).split(" | "))
    base, third, progressive, past = (form.replace("_", " ") for form in english)
    separable, german_third, participle, auxiliary = german
    prefix, _, infinitive = separable.rpartition("|")
    named = {name: value for name, _, value in (slot.partition("=") for slot in slots)}
    return Verb(base, third, progressive, past, prefix, infinitive, german_third, participle, auxiliary, named)


VERB_ROWS = [read_verb(row) for row in VERBS.splitlines()]
BE = Verb("be", "is", "-", "was", "", "sein", "ist", "gewesen", "sein", {})


# --- How words inflect ---

GENDERS = "mfnp"  # p is the plural, which is the same for all German genders
CASES = ("nominative", "accusative", "dative")


def paradigm(*rows: str) -> dict[str, dict[str, str]]:
    """Read one row per case to {case: {gender: form}}."""
    return {case: dict(zip(GENDERS, row.split(), strict=True)) for case, row in zip(CASES, rows, strict=True)}


DEFINITE = paradigm("der die das die", "den die das die", "dem der dem den")
STRONG = paradigm("er e es e", "en e es e", "em er em en")
EIN_WORDS = {"a": "ein", "no": "kein", "my": "mein", "his": "sein", "her": "ihr", "our": "unser"}
CONTRACTIONS = {"in dem": "im", "in das": "ins", "an dem": "am", "zu dem": "zum", "zu der": "zur"}

Both = tuple[str, str]
"""A phrase in English and German."""
NOTHING: Both = ("", "")


@dataclass(frozen=True)
class Phrase:
    """Determiner ("-" or "--" is none), adjective and noun, and a `tail`: a relative clause or an attribute."""

    noun: Noun
    determiner: str = "the"
    adjective: str = ""
    plural: bool = False
    tail: Both = NOTHING

    @property
    def agreement(self) -> int:
        """Form of the verb: 1 for the singular, 2 for the plural (0 is for "I")."""
        return 2 if self.plural else 1

    @property
    def gender(self) -> str:
        """Key of the paradigms."""
        return "p" if self.plural else self.noun.gender.replace("w", "m")

    @property
    def indefinite(self) -> bool:
        """Whether the phrase introduces something new."""
        return self.determiner in ("a", "two", "-")

    @property
    def pronoun(self) -> Pronoun:
        """The pronoun for a person; child and girl, which are neuter in German, have none."""
        return {"p": THEY, "m": HE, "f": SHE}[self.gender]

    def english(self) -> str:
        """The English phrase, with "an" before vowels and "these" in the plural."""
        words = join(self.adjective, self.noun.english_plural if self.plural else self.noun.english)
        special = {"a": "an" if words[0] in "aeiou" else "a", "this": "these" if self.plural else "this"}
        return join(special.get(self.determiner, self.determiner.strip("-")), words, self.tail[0])

    def german(self, case: str) -> str:
        """The German phrase in a case."""
        strong = STRONG[case][self.gender]
        # The weak ending is -e in the nominative singular and in accusatives of the same form, otherwise -en.
        unchanged = case == "nominative" or (case == "accusative" and self.gender in "fn")
        weak = "e" if self.gender in "mfn" and unchanged else "en"
        if self.determiner == "the":
            determiner, ending = DEFINITE[case][self.gender], weak
        elif self.determiner == "this":
            determiner, ending = "dies" + strong, weak
        elif self.determiner in EIN_WORDS:
            # In three places an ein-word has no ending, and the adjective has the strong one (mixed declension).
            endingless = self.gender in "mn" and unchanged
            determiner = EIN_WORDS[self.determiner] + ("" if endingless else strong)
            ending = strong if endingless else weak
        else:
            determiner, ending = "zwei" if self.determiner == "two" else "", strong
        adjective = ADJECTIVES[self.adjective].replace("teuer", "teur") + ending if self.adjective else ""
        return join(determiner, adjective, self.german_noun(case), self.tail[1])

    def german_noun(self, case: str) -> str:
        """The German noun: -n in the dative plural unless it ends in -n or -s; weak forms outside the nominative."""
        if self.plural:
            form = self.noun.german_plural
            return form + "n" if case == "dative" and form[-1] not in "ns" else form
        weak = self.noun.gender == "w" and case != "nominative"
        return self.noun.german_plural if weak else self.noun.german


@dataclass(frozen=True)
class Pronoun:
    """A personal or relative pronoun as subject."""

    words: Both
    agreement: int

    @property
    def pronoun(self) -> Pronoun:
        """The pronoun itself."""
        return self

    def english(self) -> str:
        """The English pronoun."""
        return self.words[0]

    def german(self, case: str) -> str:
        """The German pronoun, in the nominative."""
        assert case == "nominative"
        return self.words[1]


Subject = Phrase | Pronoun
HE, SHE, THEY = Pronoun(("he", "er"), 1), Pronoun(("she", "sie"), 1), Pronoun(("they", "sie"), 2)
PRONOUNS = (Pronoun(("I", "ich"), 0), Pronoun(("we", "wir"), 2), HE, SHE, THEY)


def prepositional(english: str, german: str, phrase: Phrase, case: str) -> Both:
    """A preposition with its phrase, contracted where German does: im, ins, am, zum, zur."""
    preposition, *rest = f"{german} {phrase.german(case)}".split()
    if phrase.determiner == "the" and f"{preposition} {rest[0]}" in CONTRACTIONS:
        preposition = CONTRACTIONS[f"{preposition} {rest.pop(0)}"]
    return f"{english} {phrase.english()}", join(preposition, *rest)


# English and German forms for I, singular and plural.
FINITE = {
    "be": "am is are/bin ist sind",
    "was": "was was were/war war waren",
    "haben": "have has have/habe hat haben",
    "can": "can can can/kann kann können",
    "have to": "have to,has to,have to/muss muss müssen",
    "want to": "want to,wants to,want to/will will wollen",
    "know": "know knows know/weiß weiß wissen",
    "say": "say says say/sage sagt sagen",
    "think": "think thinks think/glaube glaubt glauben",
    "know somebody": "know knows know/kenne kennt kennen",
}


def finite(word: str, agreement: int) -> Both:
    """English and German form of a word in FINITE that agrees with its subject: 0 for I, 1 singular, 2 plural.

    >>> finite("know", 0), finite("be", 1), finite("want to", 2)
    (('know', 'weiß'), ('is', 'ist'), ('want to', 'wollen'))
    """
    english, german = (row.split("," if "," in row else None)[agreement] for row in FINITE[word].split("/"))
    return english, german


def join(*words: str) -> str:
    """Join the words that are not empty by spaces, with none before a comma."""
    return " ".join(filter(None, words)).replace(" ,", ",")
