//! `dtensor bench startup`: how long it takes until ranks can work together.
//!
//! Each time is that of new processes: from when the last of them begins to make a world until all have a mesh and have met at a
//! barrier. For threads that is from before they are started; for processes it leaves out what it takes to start a program and to
//! load its libraries, and to wait for one that was started later.

use std::error::Error;

use clap::Args;

use super::contest::{Answers, Sides, peer};
use super::peer::Answer;
use super::ranks::{Question, Seat, serve};
use super::row::Sink;

const CASE: &str = "process_group_and_mesh";

/// Among whom, how often, and beside whom.
#[derive(Args)]
pub(crate) struct Options {
    #[command(flatten)]
    pub(crate) sides: Sides,
    /// Be the ranks of such a run, and say how long it took
    #[arg(long, hide = true)]
    pub(crate) serve: bool,
}

pub(crate) fn run(options: &Options, sink: Sink<'_>) -> Result<(), Box<dyn Error>> {
    let sides = &options.sides;
    if options.serve {
        return serve(sides.ranks[0].into(), answer);
    }
    if !CASE.contains(&sides.only) {
        return Ok(());
    }
    for &ranks in &sides.ranks {
        let ranks = ranks.into();
        let mut answers = Answers::of(sides.world.iter().copied());
        for _ in 0..sides.rounds {
            for (world, said) in &mut answers.ours {
                said.push(world.serve("startup", ranks)?.ask(CASE, 1, 1)?);
            }
            if let Some(path) = &sides.peer {
                let mut peer = peer(path, include_str!("startup_peer.py"), ranks)?;
                answers.theirs.push(peer.ask(CASE, 1, 1)?);
            }
        }
        answers.timed("startup", CASE, ranks).into_iter().try_for_each(&mut *sink)?;
    }
    Ok(())
}

fn answer(seat: &Seat, question: &Question) -> dtensor::Result<Answer> {
    if question.case != CASE {
        return Err(question.refuse());
    }
    let everybody = seat.world.group().all_gather_object(&(seat.began, seat.ready))?;
    let began = everybody.iter().map(|(began, _)| *began).max().unwrap_or_default();
    let ready = everybody.iter().map(|(_, ready)| *ready).max().unwrap_or_default();
    Ok(Answer { seconds: ready.saturating_sub(began) as f64 / 1e9, ..Answer::default() })
}
