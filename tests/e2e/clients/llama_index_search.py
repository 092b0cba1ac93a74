"""Documents indexed and searched by their embeddings: llama_index_search.py URL QUESTION DOCUMENT..."""

from __future__ import annotations

import json
import sys

from llama_index.core import Document, VectorStoreIndex
from llama_index.embeddings.openai_like import OpenAILikeEmbedding

if __name__ == "__main__":
    url, question, *texts = sys.argv[1:]
    model = OpenAILikeEmbedding(model_name="M", api_base=url, api_key="none", embed_batch_size=3)
    documents = [Document(text=text) for text in texts]
    index = VectorStoreIndex.from_documents(documents, embed_model=model)
    found = index.as_retriever(similarity_top_k=len(texts)).retrieve(question)
    print(json.dumps([[node.text, node.score] for node in found]))
