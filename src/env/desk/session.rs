//! One episode in the office.
//!
//! An episode succeeds when all its turns ended, the final state equals the state that the task's own
//! solution reaches in a fresh world, every required answer was given, and everything that was left out
//! was asked for before anything was changed in that turn.

use super::Limits;
use super::grammar::ask_words;
use super::splits::{solution_tools, with_distractors};
use super::tools::{TOOLS, tool};
use super::values::Val;
use super::world::World;
use crate::env::{EnvError, Message, Opening, Role, Session, StepReply, ToolResult, TurnReply};
use crate::event::{Missing, Reward, TaskSpec, ToolCall};
use crate::world::draw;

/// A session of [`super::Desk`].
pub struct DeskSession {
    limits: Limits,
    episode: Option<Episode>,
}

struct Episode {
    task: TaskSpec,
    world: World,
    tools: Vec<String>,
    turn: usize,
    steps: u32,
    useless_asks: u32,
    asked: bool,
    /// State at the beginning of the turn, to see whether something was changed before asking.
    before: [u8; 32],
    failure: Option<String>,
    done: bool,
}

fn unknown(what: String, known: &str) -> EnvError {
    EnvError::Unknown { env: "desk".to_owned(), what, known: known.to_owned() }
}

fn no_episode(op: &str) -> EnvError {
    EnvError::Refused {
        env: "desk".to_owned(),
        op: op.to_owned(),
        kind: "no_episode".to_owned(),
        message: "reset a task first".to_owned(),
    }
}

/// The world seed of a task's base.
pub fn parse_base(base: &str) -> Result<u64, EnvError> {
    base.parse().map_err(|_| {
        unknown(format!("state `{}`", base.chars().take(40).collect::<String>()), "world seeds in decimal")
    })
}

/// The tools shown for a task: its own list, or what its solution needs and distractors.
pub fn shown_tools(task: &TaskSpec) -> Result<Vec<String>, EnvError> {
    if let Some(name) = task.tools.iter().find(|t| tool(t).is_none()) {
        return Err(unknown(format!("tool `{name}`"), "the tools of `playground`"));
    }
    if !task.tools.is_empty() {
        return Ok(task.tools.clone());
    }
    let needed = solution_tools(task);
    if needed.is_empty() {
        return Ok(TOOLS.iter().map(|t| t.name.to_owned()).collect());
    }
    Ok(with_distractors(&needed, &mut draw(0, "desk shown tools", &[&task.base, &task.id])))
}

/// Lower-case words of a reply.
fn reply_words(text: &str) -> Vec<String> {
    text.split(|c: char| !c.is_alphanumeric()).filter(|w| !w.is_empty()).map(str::to_lowercase).collect()
}

/// Whether a reply gives this answer: of the values of the answer's type that it names, leaving out
/// those the query itself names, the answer is the only one.
pub fn gives_answer(reply: &str, answer: &str, query: &str) -> bool {
    let Some(wanted) = Val::parse(&answer.to_lowercase()) else {
        // An answer outside the pools (an outside author's task): the whole reply must be it.
        return reply.trim().eq_ignore_ascii_case(answer.trim());
    };
    let in_query = reply_words(query);
    let mut named: Vec<Val> = reply_words(reply)
        .iter()
        .filter(|w| !in_query.contains(w))
        .filter_map(|w| Val::parse(w))
        .filter(|v| v.ty == wanted.ty)
        .collect();
    named.dedup();
    named == [wanted]
}

/// Whether a reply asks for a left-out field: it is a question that names the field.
pub fn asks_for(reply: &str, missing: &Missing) -> bool {
    if !reply.contains('?') {
        return false;
    }
    let known = ask_words(&missing.field, Val::parse(&missing.reply).map(|v| v.ty));
    // Prepositions are too common to count as naming a field, except where the question ends in one.
    let preposition = matches!(missing.field.as_str(), "to" | "from" | "with");
    let words = reply_words(reply);
    let named = |w: &String| *w == missing.field && !preposition;
    words.iter().any(|w| known.contains(&w.as_str()) || named(w)) || words.last() == Some(&missing.field)
}

impl DeskSession {
    /// A session that is not in an episode yet.
    pub fn new(limits: Limits) -> DeskSession {
        DeskSession { limits, episode: None }
    }
}

impl Session for DeskSession {
    fn reset(&mut self, task: &TaskSpec, _episode: &str, _seed: u64) -> Result<Opening, EnvError> {
        self.episode = None;
        if task.env != "desk" {
            return Err(unknown(format!("task `{}` of environment `{}`", task.id, task.env), "desk"));
        }
        let world = World::new(parse_base(&task.base)?);
        let tools = shown_tools(task)?;
        let messages = task.turns.first().map(|t| Message { role: Role::User, content: t.query.clone() });
        let opening = Opening {
            messages: messages.into_iter().collect(),
            tools: tools.iter().filter_map(|t| tool(t)).map(super::tools::Tool::def).collect(),
            turns: task.turns.len() as u32,
            step_limit: self.limits.steps,
        };
        let before = world.digest();
        self.episode = Some(Episode {
            task: task.clone(),
            world,
            tools,
            turn: 0,
            steps: 0,
            useless_asks: 0,
            asked: false,
            before,
            failure: None,
            done: false,
        });
        Ok(opening)
    }

    fn step(&mut self, calls: &[ToolCall]) -> Result<StepReply, EnvError> {
        let limits = self.limits;
        let episode = self.episode.as_mut().ok_or_else(|| no_episode("step"))?;
        let refuse = |why: &str| ToolResult { content: format!("{{\"error\": \"{why}\"}}"), is_error: true };
        if episode.done || episode.steps >= limits.steps {
            if !episode.done {
                episode.fail(format!("more than {} steps", limits.steps));
            }
            return Ok(StepReply {
                results: calls.iter().map(|_| refuse("the episode is over")).collect(),
                done: true,
            });
        }
        episode.steps += 1;
        let mut results = Vec::with_capacity(calls.len());
        for (i, call) in calls.iter().enumerate() {
            results.push(if i >= limits.calls_per_step {
                refuse("too many calls in one step")
            } else if tool(&call.name).is_some() && !episode.tools.contains(&call.name) {
                refuse("this tool is not available here")
            } else {
                episode.world.call(call).result
            });
        }
        Ok(StepReply { results, done: false })
    }

    fn end_turn(&mut self, say: &str) -> Result<TurnReply, EnvError> {
        let limits = self.limits;
        let episode = self.episode.as_mut().ok_or_else(|| no_episode("end_turn"))?;
        let user = |text: &str| TurnReply {
            messages: vec![Message { role: Role::User, content: text.to_owned() }],
            released: Vec::new(),
            done: false,
        };
        let over = TurnReply { messages: Vec::new(), released: Vec::new(), done: true };
        if episode.done {
            return Ok(over);
        }
        let Some(turn) = episode.task.turns.get(episode.turn).cloned() else {
            episode.done = true;
            return Ok(over);
        };
        let answered = turn.answer.as_deref().is_some_and(|answer| gives_answer(say, answer, &turn.query));
        if let Some(missing) = turn.missing.as_ref().filter(|_| !episode.asked)
            && asks_for(say, missing)
        {
            if episode.world.digest() != episode.before {
                episode.fail("something was changed before asking".to_owned());
            }
            episode.asked = true;
            return Ok(user(&missing.reply));
        }
        if say.contains('?') && !answered {
            episode.useless_asks += 1;
            if episode.useless_asks <= limits.useless_asks {
                return Ok(user("no"));
            }
        }
        if turn.answer.is_some() && !answered {
            episode.fail(format!("turn {}: the answer was not given", episode.turn + 1));
        }
        if turn.missing.is_some() && !episode.asked {
            episode.fail(format!("turn {}: nothing was asked", episode.turn + 1));
        }
        episode.turn += 1;
        episode.asked = false;
        episode.before = episode.world.digest();
        match episode.task.turns.get(episode.turn) {
            // What has failed cannot be mended: no tokens are spent on the rest.
            Some(next) if episode.failure.is_none() => Ok(user(&next.query)),
            _ => {
                episode.done = true;
                Ok(over)
            }
        }
    }

    fn evaluate(&mut self) -> Result<Reward, EnvError> {
        let episode = self.episode.as_ref().ok_or_else(|| no_episode("evaluate"))?;
        if episode.task.turns.is_empty() {
            return Ok(Reward::Unscored("a playground has nothing to score".to_owned()));
        }
        let mut goal = World::new(parse_base(&episode.task.base)?);
        for (i, turn) in episode.task.turns.iter().enumerate() {
            for call in &turn.solution {
                let outcome = goal.call(call);
                if outcome.result.is_error {
                    let why =
                        format!("turn {}: the solution's {} failed: {}", i + 1, call.name, outcome.result.content);
                    return Ok(Reward::Unscored(why));
                }
            }
        }
        let all_turns = episode.turn >= episode.task.turns.len();
        let passed = episode.failure.is_none() && all_turns && episode.world.digest() == goal.digest();
        Ok(Reward::Scored(f64::from(u8::from(passed))))
    }

    fn state_digest(&mut self) -> Result<Option<[u8; 32]>, EnvError> {
        let episode = self.episode.as_ref().ok_or_else(|| no_episode("state_digest"))?;
        Ok(Some(episode.world.digest()))
    }
}

impl Episode {
    fn fail(&mut self, why: String) {
        // The first reason is the one that counts.
        self.failure.get_or_insert(why);
    }
}
