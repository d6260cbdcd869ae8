//! Tests that dropped modules are forgotten and that their ids are not reused too early.

use std::rc::Rc;

use super::names::NAMES;
use super::with_module_listener;
use crate::comm::running_module;
use crate::nn::{Linear, Module, forward};
use crate::{DType, Result, Tensor};

#[derive(Clone, Module)]
struct Wrapped {
    layer: Linear,
    own: Linear,
}

#[forward]
impl Wrapped {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        self.layer.forward(x)
    }
}

fn wrapped(layer: &Linear) -> Result<Wrapped> {
    Ok(Wrapped { layer: layer.clone(), own: Linear::new(1, 1, false)? })
}

/// Runs `body`, and returns the paths of the modules that it ran and the largest number of modules known at a time.
fn paths(body: impl FnOnce() -> Result<()>) -> Result<(Vec<&'static str>, usize)> {
    let seen = Rc::new(std::cell::RefCell::new((Vec::new(), 0)));
    let recorded = seen.clone();
    let note = move |_: &super::ModuleEntered<'_>| {
        let (paths, most) = &mut *recorded.borrow_mut();
        paths.extend(running_module().map(|running| running.path));
        *most = NAMES.with_borrow(|names| names.len().max(*most));
    };
    with_module_listener(Rc::new(note), body)?;
    Ok(seen.take())
}

#[test]
fn dropped_modules_are_forgotten_during_a_watch() -> Result<()> {
    let x = Tensor::ones([1, 1], DType::F32)?;
    let shared = Linear::new(1, 1, false)?;
    let (seen, most) = paths(|| {
        for _ in 0..1000 {
            wrapped(&shared)?.forward(&x)?;
        }
        Ok(())
    })?;
    // Every module gets its own name.
    assert_eq!(seen.len(), 2000);
    assert_eq!((seen[0], seen[1], seen[1998]), ("Wrapped", "Wrapped.layer", "Wrapped#1000"));
    assert!(most < 200, "{most}");
    // The layer is still alive, and the root in which it was found first is remembered for it.
    NAMES.with_borrow(|names| assert_eq!((names.len(), names.roots()), (1, 1)));
    drop(shared);
    paths(|| Ok(()))?;
    NAMES.with_borrow(|names| assert_eq!((names.len(), names.roots()), (0, 0)));
    Ok(())
}

#[test]
fn root_ids_are_reused_only_after_many_others() -> Result<()> {
    let x = Tensor::ones([1, 1], DType::F32)?;
    let run = || -> Result<u64> {
        let id = Rc::new(std::cell::Cell::new(0));
        let recorded = id.clone();
        let note = move |entered: &super::ModuleEntered<'_>| {
            recorded.set(entered.running.root.id.expect("it has one"))
        };
        with_module_listener(Rc::new(note), || Linear::new(1, 1, false)?.forward(&x))?;
        Ok(id.get())
    };
    let ids = (0..600).map(|_| run()).collect::<Result<Vec<_>>>()?;
    let mut distinct = ids.clone();
    distinct.sort_unstable();
    distinct.dedup();
    assert_eq!(distinct.len(), 257);
    assert_eq!(ids[257..514], ids[..257]);
    Ok(())
}
