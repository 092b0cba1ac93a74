"""What turns requests into tokens and tokens into answers.

The front end renders prompts and reads calls out of answers; the worker streams text and applies
grammars. Templates and grammars come from strangers, so they run in jails. Nothing here runs a
model. Imports: base.

    tokenizer        text to token ids and back
    detokenizer      token ids to text, one at a time
    template         chat messages to a prompt
    jobs             what the renderer is asked and answers
    renderer         the jail in which templates run
    provenance       which characters of a prompt the template wrote
    arguments        arguments of calls that a conversation carries back
    infill           a prompt to fill the middle of a text
    dialect          how a model writes calls and reasoning; a grammar of whole answers
    probes           the syntax of calls, derived from what a template renders
    tagged_call      calls in tags: parser and grammar
    json_calls       calls in JSON that are a whole answer
    reply            an answer's text to reasoning, content and calls
    grammar          grammars, made from a request and compiled
    grammar_checker  the jail in which grammars are tried
    jail             processes with limits on time and memory
"""
