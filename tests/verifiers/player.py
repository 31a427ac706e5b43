"""A harness of verifiers 0.4 that plays against a policy's endpoint; runs in .venv-verifiers, without retrain.

`player.py URL STEPS`: for each step four episodes of two turns, two of each of two tasks, whose rewards it posts.
"""

import asyncio
import sys

import httpx
import verifiers.v1 as vf


class Sum(vf.Task[vf.TaskData]):
    """Asks a sum, and then another."""

    @vf.reward
    async def even(self, trace) -> float:
        """What two episodes of a group differ in, whatever an untrained model says."""
        return float(self.data.idx % 2)


class Asker(vf.Harness[vf.HarnessConfig]):
    """Talks to the model right here instead of in a program."""

    NEEDS_CONTAINER = EXECUTES_CODE = False

    async def launch(
        self, ctx, trace, runtime, endpoint, secret, mcp_urls, data, tool_interception_url=None
    ) -> vf.ProgramResult:
        said = [{"role": "user", "content": data.prompt}]
        headers = {"Authorization": f"Bearer {secret}"}
        async with httpx.AsyncClient(timeout=300, headers=headers) as client:
            for question in ("\n1+1=", None):
                body = {"model": ctx.model, "messages": said, "max_tokens": 6}
                answer = await client.post(f"{endpoint}/chat/completions", json=body)
                answer.raise_for_status()
                said += [answer.json()["choices"][0]["message"], {"role": "user", "content": question}]
        return vf.ProgramResult(0, said[-2]["content"], "")


async def episode(agent, url, prompt, number):
    trace = await agent.run(Sum(vf.TaskData(idx=number, prompt=prompt)))
    assert trace.ok, trace.errors
    async with httpx.AsyncClient(timeout=300) as client:
        answer = await client.post(f"{url}/sessions/{trace.id}/reward", json={"reward": trace.reward})
    assert answer.json() == {"session": trace.id, "rows": 1}, answer.text


async def play(url, steps):
    client = vf.EvalClientConfig(base_url=url)
    async with vf.Agent(vf.AgentConfig(model="policy", client=client, runtime=vf.SubprocessConfig())) as agent:
        agent.harness = Asker(vf.HarnessConfig(id="null"))
        for _ in range(steps):
            prompts = ["12+34=", "12+34=", "5+6=", "5+6="]
            await asyncio.gather(*(episode(agent, url, text, number) for number, text in enumerate(prompts)))
    print("played")


asyncio.run(play(sys.argv[1], int(sys.argv[2])))
