-- Reads rows; or writes some, unless others have changed them meanwhile.
-- KEYS     counts (hashes), then texts
-- ARGV     how many counts; whether to read used ones without entries, unless one has ended; JSON of what is written:
--          {number of a row, whether it is replaced, when it expires, {field, old, new} or {field, what is added} ...};
--          '' is the field of a text, and stands for none
-- Answer   "written"; or the time, its microseconds, and each row: a text, fields and values, '' and the values of
--          FIELDS, or 0 for something else
local number, peeks, changes, rows = tonumber(ARGV[1]), ARGV[2] == '1', cjson.decode(ARGV[3]), redis.call('TIME')
local function get(key, field)
  return field == '' and redis.call('GET', key) or field ~= '' and redis.call('HGET', key, field) or ''
end
local writes = #changes > 0
for _, change in ipairs(changes) do
  if change[2] then redis.call('DEL', KEYS[change[1]]) end
  for i = 4, #change do
    local kept, old = get(KEYS[change[1]], change[i][1]), change[i][2]
    writes = writes and (kept == old or type(old) == 'number' and kept ~= '')
  end
end
for _, change in ipairs(writes and changes or {}) do
  local key, expires = KEYS[change[1]], change[3]
  for i = 4, #change do
    local field, old, new = unpack(change[i])
    if type(old) == 'number' then new = string.format('%.0f', math.max(0, get(key, field) + old)) end
    local command = field == '' and (new == '' and 'DEL' or 'SET') or new == '' and 'HDEL' or 'HSET'
    local words = {key, field ~= '' and field or new, field ~= '' and new or nil}
    if new ~= old then redis.call(command, unpack(words, 1, #words - (new == '' and 1 or 0))) end
  end
  if expires > 0 then redis.call('EXPIREAT', key, string.format('%.0f', expires)) end
end
if writes then return 'written' end

for i, key in ipairs(KEYS) do
  local row = i > number and redis.pcall('GET', key) or i <= number and redis.pcall('HMGET', key, unpack(FIELDS))
  if i <= number and not row.err then
    local all = not peeks or not row[1] or (tonumber(row[3]) or math.huge) <= tonumber(rows[1])
    if all then row = redis.pcall('HGETALL', key) else table.insert(row, 1, '') end
  end
  if row and row.err and not string.find(row.err, 'WRONGTYPE', 1, true) then error(row.err) end
  rows[i + 2] = row and (row.err and 0 or row)
end
return rows
