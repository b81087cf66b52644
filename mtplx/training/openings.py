"""First words from which the trunk goes on writing: requests, documents, and tasks about those.

Left to itself a chat model asks for essays. People also ask short questions, set sums, and paste
texts to translate, summarise or search; a head that never met those accepts little there.

No opening ends in a space: most tokenizers join a space to the word after it, and behind a lone
space hardly anything but digits follows.
"""

from __future__ import annotations

import random

_TRANSLATIONS = (
    "Translate {language} to English: {word}",
    "Translate from {language} to English: {word}",
    "Translate the following {language} sentence to English: {word}",
    "Translate into English: {word}",
    "{word}",
)

_WORDS = {
    "German": "Die Der Das Ein Eine Ich Wir Sie Er Es Man In Im Am Auf Bei Mit Nach Seit Für Zwei "
    "Viele Auch Aber Nun Wenn Doch Berlin Deutschland München Polizei Am_Montag Die_Regierung Laut",
    "French": "Le La Les Un Une Je Nous Il Elle En Dans Pour Avec Selon Depuis Paris Cette Mais",
    "Spanish": "El La Los Un Una Yo En Para Con Según Desde Madrid Esta Pero",
}

_SUMS = (
    "{name} has {n}",
    "{name} bought {n}",
    "{name} is {n} years old.",
    "{name} earns ${n}",
    "{name} went to the",
    "{name} needs to",
    "{name} and {name} are",
    "{name} reads {n} pages",
    "{name} makes",
    "It takes {name} {n} minutes",
    "A shop sells",
    "A farmer has {n}",
    "A box contains {n}",
    "A train travels",
    "A restaurant",
    "There are {n}",
    "In a class of {n} students,",
    "The price of",
    "Each",
    "Every day, {name}",
    "If {name}",
    "How many",
    "Calculate",
    "What is {n}",
    "Solve",
    "A rectangle has",
)

_QUESTIONS = (
    *("who", "who is", "who was the first", "who wrote", "who played", "who sings", "who won the"),
    *("when did", "when was", "when is", "where is", "where did", "where does", "where was"),
    *("what is", "what is the", "what does", "what are", "what year", "what kind of", "what was"),
    *("how many", "how long", "how do", "how much", "how old", "which", "in which", "why do"),
    *("the", "name the", "is the", "Who", "When", "Where", "What", "How", "Which"),
)

_REQUESTS = (
    *("Explain", "Explain how", "Describe", "Compare", "Discuss", "Give me", "Provide", "List"),
    *("What are the main causes of", "Is it true that", "What would happen if", "How can I"),
    *("Write a short story about", "Write an email to", "Draft a", "Compose a", "Write a"),
    *("Imagine you are", "Pretend to be", "You are", "Act as", "Play the part of"),
    *("Write a Python", "Write a function", "Implement", "Develop a", "Fix the following code:"),
    *("Extract", "Identify the", "Classify", "Evaluate the following", "Rewrite the following"),
    *("Suggest", "Help me plan", "Design", "Given", "Please", "Edit the following paragraph:"),
    *("Read the following", "Suppose", "Consider", "Could you", "Tell me"),
)

_NAMES = (
    *("Tom", "Anna", "James", "Sarah", "Ben", "Maria", "Jack", "Lily", "Sam", "Emma", "David"),
    *("Grace", "Mike", "Julia", "Alex", "Kate", "Omar", "Mei", "Peter", "Nina", "Carlos", "Lucy"),
    *("Tim", "Rosa", "John", "Amy", "Max", "Ella", "Ravi", "Jill"),
)

_DOCUMENTS = (
    *("(CNN) --", "LONDON (Reuters) -", "NEW YORK (AP) --", "{city}, {month} {n} --", "By {name}"),
    *("Police in {city}", "The president", "A man", "A woman", "The government of", "Scientists"),
    *("According to a report", "Officials said", "{name}, {n}, ", "The {city} team", "Last week"),
    *("{name} scored", "The United", "In {year},", "The Battle of", "The history of", "The river"),
    *("The film", "The song", "The novel", "The species", "The company", "The city of {city}"),
    *("{city} is", "The first season", "The Constitution", "The club", "The treaty", "The term"),
    *("In mathematics,", "In biology,", "In law,", "The economy of", "During the", "The human"),
)

_CITIES = ("London", "Paris", "Chicago", "Berlin", "Sydney", "Toronto", "Mumbai", "Lagos", "Rome")

_MONTHS = ("January", "March", "April", "June", "July", "September", "October", "December")

TASKS = (
    "Summarize: {document}",
    "Summarize the following text:\n\n{document}",
    "{document}\n\nSummarize the text above.",
    "Summarize this article: {document}",
    "{document}\n\nWhat are the key points?",
    "{document}\n{question}",
    "{document}\n\n{question}",
    "{document}\n{question}",
    "Read the passages below and answer the question.\n\n{document}\n\nQuestion: {question}",
    "Answer the question using the context.\n\nContext: {document}\n\nQuestion: {question}",
    "Here are some search results:\n{document}\n\n{question}",
    "Rewrite the following text in simpler words: {document}",
)
"""What is asked about a document; some with a question that has nothing to do with it."""


def request(rng: random.Random) -> str:
    """The first words of something that people ask."""
    kind = rng.randrange(4)
    if kind == 0:
        language = rng.choice(list(_WORDS))
        word = rng.choice(_WORDS[language].split()).replace("_", " ")
        return rng.choice(_TRANSLATIONS).format(language=language, word=word)
    return _filled(rng.choice((_SUMS, _QUESTIONS, _REQUESTS)[kind - 1]), rng)


def document(rng: random.Random) -> str:
    """The first words of a news report or an encyclopedia's article."""
    return _filled(rng.choice(_DOCUMENTS), rng)


def _filled(opening: str, rng: random.Random) -> str:
    while "{" in opening:
        for field, values in (("{name}", _NAMES), ("{city}", _CITIES), ("{month}", _MONTHS)):
            opening = opening.replace(field, rng.choice(values), 1)
        opening = opening.replace("{n}", str(rng.randrange(2, 100)), 1)
        opening = opening.replace("{year}", str(rng.randrange(1850, 2024)), 1)
    return opening.rstrip()
