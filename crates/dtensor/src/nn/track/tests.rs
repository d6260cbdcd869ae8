//! What is kept of modules that are gone.

use std::rc::Rc;

use super::names::NAMES;
use super::watched;
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

/// Runs `body`, and gives the paths of the modules that it ran and how many modules were known at most.
fn paths(body: impl FnOnce() -> Result<()>) -> Result<(Vec<&'static str>, usize)> {
    let heard = Rc::new(std::cell::RefCell::new((Vec::new(), 0)));
    let noted = heard.clone();
    let note = move |_: &super::Entered<'_>| {
        let (paths, most) = &mut *noted.borrow_mut();
        paths.extend(running_module().map(|running| running.path));
        *most = NAMES.with_borrow(|names| names.len().max(*most));
    };
    watched(Rc::new(note), body)?;
    Ok(heard.take())
}

#[test]
fn modules_that_are_gone_are_forgotten_while_somebody_watches() -> Result<()> {
    let x = Tensor::ones([1, 1], DType::F32)?;
    let shared = Linear::new(1, 1, false)?;
    let (heard, most) = paths(|| {
        for _ in 0..1000 {
            wrapped(&shared)?.forward(&x)?;
        }
        Ok(())
    })?;
    // Each is one of its own, all the same.
    assert_eq!(heard.len(), 2000);
    assert_eq!((heard[0], heard[1], heard[1998]), ("Wrapped", "Wrapped.layer", "Wrapped#1000"));
    assert!(most < 200, "{most}");
    // The layer is still there, and the root that it was found in first is remembered for it.
    NAMES.with_borrow(|names| assert_eq!((names.len(), names.roots()), (1, 1)));
    drop(shared);
    paths(|| Ok(()))?;
    NAMES.with_borrow(|names| assert_eq!((names.len(), names.roots()), (0, 0)));
    Ok(())
}

#[test]
fn numbers_of_roots_are_used_again_but_not_soon() -> Result<()> {
    let x = Tensor::ones([1, 1], DType::F32)?;
    let run = || -> Result<u64> {
        let number = Rc::new(std::cell::Cell::new(0));
        let noted = number.clone();
        let note =
            move |entered: &super::Entered<'_>| noted.set(entered.running.root.id.expect("it has one"));
        watched(Rc::new(note), || Linear::new(1, 1, false)?.forward(&x))?;
        Ok(number.get())
    };
    let numbers = (0..600).map(|_| run()).collect::<Result<Vec<_>>>()?;
    let mut distinct = numbers.clone();
    distinct.sort_unstable();
    distinct.dedup();
    assert_eq!(distinct.len(), 257);
    assert_eq!(numbers[257..514], numbers[..257]);
    Ok(())
}
