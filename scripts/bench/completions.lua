-- Completions for wrk: prompts that differ and answers of 24 to 40 tokens, so that requests join and leave at any step.
-- `wrk -t1 -cSTREAMS -s completions.lua URL` ends with the line "tokens/s RATE, errors N".
--
-- The rate is that of the answers that came after the first from each stream, from there to the last answer: neither the start
-- nor what is under way at the end counts.
local ffi = require("ffi")
ffi.cdef [[
typedef struct { long seconds, microseconds; } bench_time;
int gettimeofday(bench_time *, void *);
]]

local function now()
  local t = ffi.new("bench_time")
  ffi.C.gettimeofday(t, nil)
  return tonumber(t.seconds) + tonumber(t.microseconds) / 1e6
end

-- In the thread.
local sent, answered, streams = 0, 0, 0
tokens, errors, began, ended = 0, 0, 0, 0 -- read by done

function init(args)
  streams = tonumber(args[1])
end

function request()
  sent = sent + 1
  local body = string.format(
    '{"prompt":"Chapter %d. Write a long story about a lighthouse and the people who keep it.","max_tokens":%d,' ..
    '"temperature":0,"ignore_eos":true,"cache_prompt":false}', sent, 24 + sent * 7 % 17)
  return wrk.format("POST", "/v1/completions", { ["Content-Type"] = "application/json" }, body)
end

function response(status, headers, body)
  answered = answered + 1
  local made = body:match('"completion_tokens":%s*(%d+)')
  if status ~= 200 or not made then
    errors = errors + 1
  elseif answered > streams then
    tokens, ended = tokens + tonumber(made), now()
  else
    began = now()
  end
end

-- In the main program.
local threads = {}

function setup(thread)
  table.insert(threads, thread)
end

function done()
  local t = threads[1]
  local time = t:get("ended") - t:get("began")
  io.write(string.format("tokens/s %.2f, errors %d\n", time > 0 and t:get("tokens") / time or 0, t:get("errors")))
end
