//! A process that is killed while it saves: the newest complete checkpoint still loads.

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use dtensor::Generator;
use dtensor::checkpoint::{self, Checkpoint, CheckpointManager};
use dtensor::nn::{Module, Parameter};
use dtensor::prelude::*;

use crate::common::scratch::Scratch;

/// The environment variable of the process that saves until it is killed: the folder that it saves to.
const CHILD: &str = "DTENSOR_TEST_SAVES_TO";
/// The line that this process prints when it has saved twice.
const SAVED: &str = "saved both";
const KILLS: u64 = 50;
const RANKS: usize = 4;

#[derive(Module)]
struct Two {
    large: Parameter,
    small: Parameter,
}

impl Two {
    fn new(step: u64) -> Result<Two> {
        let value = |shape: [usize; 2]| Tensor::full(shape, step as f64, DType::F32);
        Ok(Two { large: Parameter::new(&value([512, 128])?)?, small: Parameter::new(&value([3, 2])?)? })
    }

    fn expect(&self, step: u64) -> Result<()> {
        for parameter in self.parameters() {
            let values = parameter.get().to_vec::<f32>()?;
            assert!(values.iter().all(|&value| value == step as f32), "not all values are of step {step}");
        }
        Ok(())
    }
}

/// Saves forever: new steps, of which three stay, and one folder that is replaced again and again.
fn save_until_killed(folder: &Path) -> Result<()> {
    let manager = CheckpointManager::new(folder.join("steps")).keep(3);
    let first = manager.latest()?.map_or(0, |step| step + 1);
    launch(RANKS, |world| {
        let mesh = DeviceMesh::new(&world, [RANKS], ())?;
        for step in first.. {
            let model = Two::new(step)?;
            for parameter in model.parameters() {
                parameter.replace(&distribute_tensor(&parameter.get().detach(), &mesh, [Shard(0)])?)?;
            }
            let contents = Checkpoint::new().model(&model).value("step", step);
            manager.save(step, &contents)?;
            contents.save(folder.join("replaced"))?;
            if world.rank() == 0 {
                println!("{SAVED}");
            }
        }
        Ok(())
    })?;
    Ok(())
}

#[test]
fn a_killed_save_harms_nothing() -> Result<()> {
    if let Some(folder) = std::env::var_os(CHILD) {
        return save_until_killed(Path::new(&folder));
    }
    let scratch = Scratch::new();
    let folder = scratch.join("");
    let manager = CheckpointManager::new(folder.join("steps"));
    let mut moments = Generator::new(1);
    let (mut last, mut leftovers) = (None, 0);
    // The time between two lines, in the process before.
    let mut both = Duration::ZERO;
    for kill in 0..KILLS {
        let moment = Tensor::rand_with([1], DType::F32, &mut moments)?.item::<f32>()?;
        let program = std::env::current_exe().expect("this program");
        let mut child = Command::new(program)
            .args(["laws_checkpoint::interrupted::a_killed_save_harms_nothing", "--exact", "--nocapture"])
            .env(CHILD, &folder)
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .expect("a process");
        let output = BufReader::new(child.stdout.take().expect("its output"));
        let mut saved = output.lines().filter(|line| line.as_ref().is_ok_and(|line| line.ends_with(SAVED)));
        // Killed at a random moment of the next two saves, however fast this machine is now.
        let mut next = || saved.next().map(|_| Instant::now()).expect("it saves until it is killed");
        let first = next();
        both = if kill % 10 == 0 { next() - first } else { both };
        std::thread::sleep(both.mul_f32(moment));
        child.kill().expect("it runs until it is killed");
        let status = child.wait().expect("it was started");
        assert!(status.code().is_none(), "kill {kill}: it ended by itself: {status}");

        let step = manager.latest()?.expect("one was complete");
        assert!(last <= Some(step), "step {step} after {last:?}");
        last = Some(step);
        for saved in manager.steps()? {
            let model = Two::new(0)?;
            let loaded = manager.load(saved, &Checkpoint::new().model(&model))?;
            assert_eq!(loaded.value::<u64>("step")?, saved);
            model.expect(saved)?;
        }
        let model = Two::new(0)?;
        let replaced = folder.join("replaced");
        let step: u64 = Checkpoint::new().model(&model).load(&replaced)?.value("step")?;
        model.expect(step)?;
        let unfinished = |name: &str| name.ends_with(".saving");
        let names = std::fs::read_dir(folder.join("steps")).expect("the folder");
        leftovers +=
            names.filter(|entry| unfinished(entry.as_ref().unwrap().file_name().to_str().unwrap())).count();
    }
    assert!(last >= Some(KILLS), "only {last:?} steps were saved");
    // Otherwise no process was killed while it saved.
    assert!(leftovers > 0);
    // The next save of a step removes what an interrupted save of it has left.
    let next = last.unwrap() + 1;
    checkpoint::save(&Two::new(next)?, manager.path(next))?;
    Ok(())
}
