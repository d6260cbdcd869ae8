//! Tests `+ - * /` between owned or borrowed tensors, numbers and `Result`s: an expression needs only one `?`.

use dtensor::prelude::*;

fn tensor(x: [f64; 2]) -> Tensor {
    Tensor::from_slice(&x, [2]).unwrap()
}

fn values(x: Result<Tensor>) -> Vec<f64> {
    x.unwrap().to_vec().unwrap()
}

#[test]
fn every_operator_takes_owned_and_borrowed_tensors() {
    let (a, b) = (|| tensor([6., 8.]), || tensor([2., 4.]));
    macro_rules! check {
        ($($op:tt $expected:expr;)*) => {$(
            assert_eq!(values(&a() $op &b()), $expected);
            assert_eq!(values(&a() $op b()), $expected);
            assert_eq!(values(a() $op &b()), $expected);
            assert_eq!(values(a() $op b()), $expected);
            assert_eq!(values(Ok(a()) $op &b()), $expected);
            assert_eq!(values(Ok(a()) $op b()), $expected);
            assert_eq!(values(&a() $op Ok(b())), $expected);
            assert_eq!(values(a() $op Ok(b())), $expected);
        )*};
    }
    check! {
        + [8., 12.];
        - [4., 4.];
        * [12., 32.];
        / [3., 2.];
    }
    assert_eq!(values(-a()), [-6., -8.]);
    assert_eq!(values(-&a()), [-6., -8.]);
}

#[test]
fn every_operator_takes_numbers_on_either_side() {
    let a = || tensor([2., 4.]);
    macro_rules! check {
        ($($number:expr),*) => {$(
            assert_eq!(values(&a() + $number), [10., 12.]);
            assert_eq!(values(a() - $number), [-6., -4.]);
            assert_eq!(values(a() * $number), [16., 32.]);
            assert_eq!(values(&a() / $number), [0.25, 0.5]);
            assert_eq!(values($number + a()), [10., 12.]);
            assert_eq!(values($number - &a()), [6., 4.]);
            assert_eq!(values($number * &a()), [16., 32.]);
            assert_eq!(values($number / a()), [4., 2.]);
        )*};
    }
    check!(8.0, 8);
}

#[test]
fn an_expression_needs_one_question_mark() -> Result<()> {
    let (x, target, bias) = (tensor([3., 5.]), tensor([1., 1.]), tensor([10., 20.]));
    let y = (x.relu()? * 0.5 - &target + &bias)?;
    assert_eq!(y.to_vec::<f64>()?, [10.5, 21.5]);
    // Rust does not allow an operator between two `Result`s, or a `Result` and a number, so one of them needs a `?`.
    let y = (&x * &x + (x.exp() * &bias - target)?)?;
    assert_eq!(y.dims(), [2]);
    Ok(())
}

#[test]
fn an_expression_returns_its_first_error() -> Result<()> {
    let (a, b) = (tensor([1., 2.]), Tensor::zeros([3], DType::F64)?);
    let line = line!() + 1;
    let error = (&a + &b * &a + &a).unwrap_err().to_string();
    assert!(error.starts_with("mul: ") && error.contains(&format!("{}:{line}", file!())), "{error}");
    let error = (&a - b.matmul(&a) * &a).unwrap_err().to_string();
    assert!(!error.starts_with("mul: ") && !error.starts_with("sub: "), "{error}");
    Ok(())
}
