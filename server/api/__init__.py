"""OpenAI's routes: a checked body becomes a job, and what the job gives becomes an answer in OpenAI's shapes."""
