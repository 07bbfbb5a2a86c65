"""Names of span attributes, from OpenTelemetry's GenAI conventions if possible, else our own."""

from opentelemetry.semconv._incubating.attributes import gen_ai_attributes as gen_ai
from opentelemetry.semconv.attributes import error_attributes

ERROR_TYPE = error_attributes.ERROR_TYPE  # a short reason code, such as call_timeout

OPERATION_NAME = gen_ai.GEN_AI_OPERATION_NAME
PROVIDER_NAME = gen_ai.GEN_AI_PROVIDER_NAME
AGENT_NAME = gen_ai.GEN_AI_AGENT_NAME
INPUT_MESSAGES = gen_ai.GEN_AI_INPUT_MESSAGES
OUTPUT_MESSAGES = gen_ai.GEN_AI_OUTPUT_MESSAGES
REQUEST_MODEL = gen_ai.GEN_AI_REQUEST_MODEL
REQUEST_CHOICE_COUNT = gen_ai.GEN_AI_REQUEST_CHOICE_COUNT
REQUEST_MAX_TOKENS = gen_ai.GEN_AI_REQUEST_MAX_TOKENS
REQUEST_SEED = gen_ai.GEN_AI_REQUEST_SEED
REQUEST_STOP_SEQUENCES = gen_ai.GEN_AI_REQUEST_STOP_SEQUENCES
REQUEST_TEMPERATURE = gen_ai.GEN_AI_REQUEST_TEMPERATURE
REQUEST_TOP_K = gen_ai.GEN_AI_REQUEST_TOP_K
REQUEST_TOP_P = gen_ai.GEN_AI_REQUEST_TOP_P
RESPONSE_FINISH_REASONS = gen_ai.GEN_AI_RESPONSE_FINISH_REASONS
RESPONSE_ID = gen_ai.GEN_AI_RESPONSE_ID
RESPONSE_MODEL = gen_ai.GEN_AI_RESPONSE_MODEL
TOOL_ARGUMENTS = gen_ai.GEN_AI_TOOL_CALL_ARGUMENTS
TOOL_CALL_ID = gen_ai.GEN_AI_TOOL_CALL_ID
TOOL_NAME = gen_ai.GEN_AI_TOOL_NAME
TOOL_TYPE = gen_ai.GEN_AI_TOOL_TYPE
TOOL_RESULT = gen_ai.GEN_AI_TOOL_CALL_RESULT
USAGE_INPUT_TOKENS = gen_ai.GEN_AI_USAGE_INPUT_TOKENS
USAGE_OUTPUT_TOKENS = gen_ai.GEN_AI_USAGE_OUTPUT_TOKENS

# From OpenInference, which instruments many frameworks.
SPAN_KIND = "openinference.span.kind"
INPUT, OUTPUT = "input.value", "output.value"  # human-readable text

CHAT = gen_ai.GenAiOperationNameValues.CHAT.value
TEXT_COMPLETION = gen_ai.GenAiOperationNameValues.TEXT_COMPLETION.value
EXECUTE_TOOL = gen_ai.GenAiOperationNameValues.EXECUTE_TOOL.value
INVOKE_AGENT = gen_ai.GenAiOperationNameValues.INVOKE_AGENT.value
GENERATIONS = (CHAT, TEXT_COMPLETION)  # operations whose spans hold sampled tokens

DIALECT = "lightning.dialect"  # wire format of the call
ROLLOUT_ID = "lightning.rollout_id"  # of a call made under a rollout's URL
AGENT = "lightning.agent"  # sub-agent that made the call
POLICY = "lightning.policy"  # model name that the agent requested
ANSWERED_BY = "lightning.answered_by"  # the config's policy that sampled it
PROMPT_TOKEN_IDS = "lightning.prompt_token_ids"  # as the engine read them
RESPONSE_TOKEN_IDS = "lightning.response_token_ids"  # as sampled
BEHAVIOR_LOGPROBS = "lightning.behavior_logprobs"  # of the policy at temperature 1
SAMPLING_LOGPROBS = "lightning.sampling_logprobs"  # of the distribution that was sampled
TEMPERED_LOGPROBS = "lightning.tempered_logprobs"  # of the policy at the call's temperature
POLICY_VERSIONS = "lightning.policy_versions"  # weights version that sampled each token
FORCED = "lightning.forced"  # True if a grammar left no choice; set only if any is True
LATE = "lightning.late"  # True if a time limit ended the response; its finish reason is length
ADJUSTED = "lightning.adjusted"  # True if biases, penalties or a grammar changed the logits
GRAMMAR = "lightning.grammar"  # of the response; set if it alone shaped what was sampled
REWARD = "lightning.reward"  # of a call or an exported rollout; in a reward span, the posted one
REWARD_CALL = "lightning.reward_call"  # response id of the call that earned it
REWARD_CHOICE = "lightning.reward_choice"  # index of the call's choice
ROLE = "lightning.role"  # first of the config's roles that the call matched
TRAINS = "lightning.trains"  # False if the call's role or policy is part of the environment
SERVED_BY = "lightning.served_by"  # server that answered instead of the policy
MALFORMED_TOOL_CALLS = "lightning.malformed_tool_calls"  # in the response; set if not 0
PREFIX_BREAKS = "lightning.prefix_breaks"  # 1 if a replayed response is not a prefix of this prompt
REQUEST_MIN_P = "lightning.min_p"  # requested min-p
CHAT_TEMPLATE_KWARGS = "lightning.chat_template_kwargs"  # JSON; set if the request sent some
PROMPTS = "lightning.prompts"  # of a rollout: JSON of the prompts that its agent got, if any
CHOICE_INDEX = "lightning.choice_index"  # of a call with several choices
DROPPED_ATTRIBUTES = "lightning.dropped_attributes"  # of a posted span: number that were too long

# Of exported traces; see docs/howto/export_traces.md.
TASK_ID = "lightning.task_id"  # of a rollout
GROUP_ID = "lightning.group_id"  # of the rollouts of one task in one step
PHASE = "lightning.phase"  # train, eval, sampled, probe or prompt
STEP = "lightning.step"  # trainer step that requested the rollout
ATTEMPT = "lightning.attempt"  # 1 for the first
STATUS = "lightning.status"  # scored, agent_failure or infrastructure_failure
REASON = "lightning.reason"  # short code of a failure
DETAIL = "lightning.detail"  # one sentence on a failure
COMPONENT_PREFIX = "lightning.component."  # before a name of `rewards`: what it gave
METRIC_PREFIX = "lightning.metric."  # before the name of another number that the agent returned
ADVANTAGE = "lightning.advantage"  # of a trained call, or the mean of a rollout's trained calls
VERSION = "lightning.version"  # newest weights version that sampled a token
ORIGINAL_TRACE_ID = "lightning.original_trace_id"  # of a span that an agent put in another trace
