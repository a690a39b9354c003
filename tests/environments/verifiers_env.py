"""An environment of verifiers 0.1, which asks until the answer is right."""


def load_environment(most=4):
    import verifiers as vf
    from datasets import Dataset

    class Again(vf.MultiTurnEnv):
        async def env_response(self, messages, state, **others):
            if "4" in str(messages[-1].content):
                state["final_env_response"] = [vf.UserMessage(content="right")]
                return state["final_env_response"]
            return [vf.UserMessage(content="no, again")]

    async def right(completion, answer, **others):
        return float(any(answer == str(message.content) for message in completion))

    rows = [{"prompt": [{"role": "user", "content": "2+2?"}], "answer": "4"}]
    return Again(dataset=Dataset.from_list(rows), rubric=vf.Rubric(funcs=[right]), max_turns=most)
