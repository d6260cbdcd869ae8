//! Helpers of the tests of modules on a mesh: they count collectives, compare values and check errors.

use dtensor::comm::record;
use dtensor::{Error, Result, Tensor};

/// Runs `body` and returns its result with the collectives it issues, as `AG 1 + RS 2`, or `0` if there are none.
pub fn counted<R>(body: impl FnOnce() -> Result<R>) -> Result<(R, String)> {
    let (result, calls) = record(body);
    let names = [
        ("AG", "all_gather"),
        ("AR", "all_reduce"),
        ("A2A", "all_to_all"),
        ("RS", "reduce_scatter"),
        ("B", "broadcast"),
        ("S", "scatter"),
    ];
    let mut left = calls.len();
    let mut shown = Vec::new();
    for (short, name) in names {
        let count = calls.iter().filter(|call| call.collective.name() == name).count();
        if count > 0 {
            shown.push(format!("{short} {count}"));
            left -= count;
        }
    }
    assert_eq!(left, 0, "a collective of another kind: {calls:?}");
    Ok((result?, if shown.is_empty() { "0".to_string() } else { shown.join(" + ") }))
}

/// Asserts that a result is an error whose message contains these words, ignoring case.
#[track_caller]
pub fn raises<T>(result: Result<T>, words: &str) -> Error {
    let Err(error) = result else { panic!("accepted, but expected {words:?}") };
    assert!(error.to_string().to_lowercase().contains(&words.to_lowercase()), "{error}");
    error
}

/// Asserts that two tensors have the same shape and nearly the same values. A distributed tensor is gathered first.
#[track_caller]
pub fn close(a: &Tensor, b: &Tensor) {
    let whole = |x: &Tensor| if x.is_distributed() { x.full_tensor().unwrap() } else { x.clone() };
    let (a, b) = (whole(a), whole(b));
    assert_eq!(a.dims(), b.dims());
    let (a, b) = (a.to_f64_vec().unwrap(), b.to_f64_vec().unwrap());
    for (i, (x, y)) in a.iter().zip(&b).enumerate() {
        assert!((x - y).abs() <= 1e-5 * (1.0 + y.abs()), "at {i}: {x} and {y}\n{a:?}\n{b:?}");
    }
}
