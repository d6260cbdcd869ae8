//! Tests how local tensors are constructed, read, printed and converted.

use dtensor::{CrossEntropyOptions, DType, Device, Element, Error, Result, Scalar, Shape, Tensor};
use half::{bf16, f16};

use crate::common::peek::value;

fn f64s(values: &[f64], shape: &[usize]) -> Tensor {
    Tensor::from_slice(values, shape).unwrap()
}

#[test]
fn elements_round_trip_in_every_dtype() -> Result<()> {
    fn there_and_back<T: Element + PartialEq + std::fmt::Debug>(values: &[T]) -> Result<()> {
        for shape in [vec![6], vec![2, 3], vec![3, 1, 2], vec![1, 6, 1, 1]] {
            let x = Tensor::from_slice(values, &shape[..])?;
            assert_eq!((x.dims(), x.dtype()), (&shape[..], <T as Element>::DTYPE));
            assert_eq!((x.numel(), x.ndim(), x.device()), (6, shape.len(), Device::Cpu));
            assert!(x.is_contiguous() && x.is_leaf() && !x.requires_grad());
            assert_eq!(x.to_vec::<T>()?, values);
            assert_eq!(Tensor::from_vec(values.to_vec(), &shape[..])?.to_vec::<T>()?, values);
        }
        let x = Tensor::from_slice(values, [2, 3])?;
        assert_eq!(x.to_vec2::<T>()?, [&values[..3], &values[3..]]);
        let turned: Vec<T> = [0, 3, 1, 4, 2, 5].iter().map(|&i| values[i]).collect();
        assert_eq!(x.t()?.to_vec::<T>()?, turned);
        for (i, &value) in values.iter().enumerate() {
            assert_eq!(Tensor::scalar(value)?.item::<T>()?, value);
            assert_eq!(x.select(0, i as isize / 3)?.select(0, i as isize % 3)?.item::<T>()?, value);
        }
        assert_eq!(Tensor::from_slice::<T>(&[], [0, 4])?.to_vec::<T>()?, []);
        assert_eq!(Tensor::scalar(values[0])?.dims(), [0usize; 0]);
        Ok(())
    }
    there_and_back(&[0u8, 1, 2, 127, 128, 255])?;
    there_and_back(&[0i64, -1, i64::MIN, i64::MAX, 9007199254740993, 42])?;
    there_and_back(&[0f32, -0.0, f32::MIN_POSITIVE, f32::MAX, f32::NEG_INFINITY, 1e-45])?;
    there_and_back(&[0f64, -0.0, f64::MIN_POSITIVE, f64::MAX, f64::NEG_INFINITY, 5e-324])?;
    there_and_back(&[f16::ZERO, f16::NEG_ONE, f16::MAX, f16::MIN, f16::INFINITY, f16::EPSILON])?;
    there_and_back(&[bf16::ZERO, bf16::NEG_ONE, bf16::MAX, bf16::MIN, bf16::INFINITY, bf16::EPSILON])?;
    // A NaN keeps its payload bits.
    let strange = f32::from_bits(0x7fc0_1234);
    assert_eq!(Tensor::scalar(strange)?.item::<f32>()?.to_bits(), strange.to_bits());
    Ok(())
}

#[test]
fn every_dtype_reads_as_f64() -> Result<()> {
    for dtype in DType::ALL {
        let x = Tensor::arange(0, 4, 1, dtype)?;
        assert_eq!(x.to_f64_vec()?, [0., 1., 2., 3.], "{dtype}");
        assert_eq!(x.select(0, 3)?.item_f64()?, 3.0, "{dtype}");
    }
    Ok(())
}

#[test]
fn constructors_fill_every_dtype() -> Result<()> {
    for dtype in DType::ALL {
        let of = |x: Tensor| {
            assert_eq!(x.dtype(), dtype);
            x.to_f64_vec().unwrap()
        };
        assert_eq!(of(Tensor::zeros([2, 2], dtype)?), [0.; 4]);
        assert_eq!(of(Tensor::ones([3], dtype)?), [1.; 3]);
        assert_eq!(of(Tensor::full([2], 7, dtype)?), [7.; 2]);
        assert_eq!(of(Tensor::full((), 7.0, dtype)?), [7.]);
        assert_eq!(of(Tensor::full([0, 3], 7, dtype)?), [0.; 0]);
        assert_eq!(of(Tensor::eye(3, dtype)?), [1., 0., 0., 0., 1., 0., 0., 0., 1.]);
        assert_eq!(of(Tensor::eye(0, dtype)?), [0.; 0]);
        assert_eq!(of(Tensor::arange(1, 8, 3, dtype)?), [1., 4., 7.]);
        assert_eq!(of(Tensor::arange(1, 7, 3, dtype)?), [1., 4.]);
        assert_eq!(of(Tensor::arange(9, 2, -3, dtype)?), [9., 6., 3.]);
        assert_eq!(of(Tensor::arange(5, 5, 1, dtype)?), [0.; 0]);
        assert_eq!(of(Tensor::linspace(0.0, 8.0, 5, dtype)?), [0., 2., 4., 6., 8.]);
        assert_eq!(of(Tensor::linspace(3.0, 8.0, 1, dtype)?), [3.]);
        assert_eq!(of(Tensor::linspace(3.0, 8.0, 0, dtype)?), [0.; 0]);
        let x = Tensor::full([2, 1], 5, dtype)?;
        assert_eq!(of(x.zeros_like()?), [0.; 2]);
        assert_eq!(of(x.ones_like()?), [1.; 2]);
        assert_eq!(of(x.full_like(3)?), [3.; 2]);
        assert_eq!(x.empty_like(Device::Cpu)?.meta(), x.meta());
        assert!(x.empty_like(Device::Meta)?.is_meta());
        if dtype.is_float() {
            assert_eq!(of(Tensor::arange(0, 1, 0.25, dtype)?), [0., 0.25, 0.5, 0.75]);
            assert_eq!(of(Tensor::full([1], -1.5, dtype)?), [-1.5]);
            assert_eq!(of(Tensor::linspace(1.0, -1.0, 5, dtype)?), [1., 0.5, 0., -0.5, -1.]);
        }
    }
    // Integers beyond 2⁵³ are exact.
    assert_eq!(Tensor::full([1], i64::MAX, DType::I64)?.item::<i64>()?, i64::MAX);
    assert_eq!(Tensor::full([1], -0.0, DType::F64)?.item::<f64>()?.to_bits(), (-0.0f64).to_bits());
    // Both ends are exact for any step.
    let x = Tensor::linspace(0.1, 0.7, 8, DType::F64)?.to_vec::<f64>()?;
    assert_eq!((x[0], x[7]), (0.1, 0.7));
    // Elements are multiples of the step and not running sums, so rounding errors do not grow.
    let x = Tensor::arange(0, 1000, 0.1, DType::F64)?.to_vec::<f64>()?;
    assert_eq!((x.len(), x[9999]), (10000, 9999.0 * 0.1));
    Ok(())
}

#[test]
fn integer_arithmetic_is_exact() -> Result<()> {
    let odd = (1i64 << 53) + 1;
    let x = Tensor::from_slice(&[odd, -odd], [2])?;
    assert_eq!(x.add(1)?.to_vec::<i64>()?, [odd + 1, 1 - odd]);
    assert_eq!(x.mul(3)?.to_vec::<i64>()?, [3 * odd, -3 * odd]);
    // Scalar operands that no f64 can represent.
    let one = Tensor::from_slice(&[1i64], [1])?;
    assert_eq!(one.add(odd)?.to_vec::<i64>()?, [odd + 1]);
    assert_eq!(one.sub(odd)?.to_vec::<i64>()?, [1 - odd]);
    assert_eq!(one.mul(odd)?.to_vec::<i64>()?, [odd]);
    assert_eq!(one.rsub(odd)?.to_vec::<i64>()?, [odd - 1]);
    assert_eq!(one.maximum(odd)?.to_vec::<i64>()?, [odd]);
    assert_eq!(Tensor::from_slice(&[odd, odd - 1], [2])?.eq(odd)?.to_vec::<u8>()?, [1, 0]);
    assert_eq!(one.masked_fill(&one.eq(1)?, odd)?.to_vec::<i64>()?, [odd]);
    assert_eq!(one.clamp_min(odd)?.to_vec::<i64>()?, [odd]);
    assert_eq!(x.clamp_max(odd - 2)?.to_vec::<i64>()?, [odd - 2, -odd]);
    assert_eq!(x.clamp(i64::MIN, i64::MAX)?.to_vec::<i64>()?, [odd, -odd]);
    assert_eq!(Tensor::arange(odd, odd + 3, 1, DType::I64)?.to_vec::<i64>()?, [odd, odd + 1, odd + 2]);
    assert_eq!(Tensor::arange(odd, odd - 3, -2, DType::I64)?.to_vec::<i64>()?, [odd, odd - 2]);
    let ends = Tensor::arange(i64::MIN, i64::MAX, i64::MAX, DType::I64)?.to_vec::<i64>()?;
    assert_eq!(ends, [i64::MIN, -1, i64::MAX - 1]);
    Ok(())
}

#[test]
fn shapes_convert_from_integers_arrays_vectors_and_iterators() -> Result<()> {
    let dims = |shape: Shape| Tensor::zeros(shape, DType::F32).unwrap().dims().to_vec();
    assert_eq!(dims(().into()), [0usize; 0]);
    assert_eq!(dims(3.into()), [3]);
    assert_eq!(dims([2, 3].into()), [2, 3]);
    assert_eq!(dims((&[2, 3]).into()), [2, 3]);
    assert_eq!(dims(vec![2, 3].into()), [2, 3]);
    assert_eq!(dims((&[2usize, 3][..]).into()), [2, 3]);
    assert_eq!(dims((&Shape::from([4])).into()), [4]);
    assert_eq!(dims([1, 2].into_iter().collect()), [1, 2]);
    let shape = Shape::from([2, 3, 4]);
    assert_eq!((shape.numel(), shape.ndim(), shape.to_string()), (24, 3, "[2, 3, 4]".to_string()));
    let x = Tensor::zeros(shape, DType::F32)?;
    assert_eq!((x.size(0)?, x.size(-1)?, x.size(-3)?), (2, 4, 2));
    Ok(())
}

#[test]
fn clones_views_and_detached_tensors_share_one_storage() -> Result<()> {
    let x = Tensor::arange(0, 6, 1, DType::F32)?.reshape([2, 3])?;
    let start = value(&x)?;
    for view in [
        x.clone(),
        x.detach(),
        x.requires_grad_(true)?,
        x.t()?,
        x.reshape([6])?,
        x.view([3, 2])?,
        x.unsqueeze(0)?,
        x.narrow(0, 0, 1)?,
        x.select(1, 0)?,
        x.expand([4, 2, 3])?,
        x.contiguous()?,
        x.to_dtype(DType::F32)?,
    ] {
        assert!(value(&view)?.shares_storage(&start), "{:?}", view.dims());
    }
    assert!(value(&x.narrow(0, 1, 1)?)?.shares_storage(&start));
    assert!(!value(&x.t()?.contiguous()?)?.shares_storage(&start));
    assert!(!value(&x.t()?.reshape([6])?)?.shares_storage(&start));
    Ok(())
}

#[test]
fn meta_tensors_have_shape_and_dtype_but_no_value() -> Result<()> {
    // Nothing is allocated, so any size that can be addressed works.
    let x = Tensor::meta_of([1 << 20, 1 << 20, 1 << 10], DType::BF16)?;
    assert!(x.is_meta() && x.device() == Device::Meta && x.numel() == 1 << 50);
    let y = x.add(1.0)?.sum_keepdim(1)?.t();
    assert!(y.is_err());
    let y = x.add(1.0)?.sum(1)?.t()?;
    assert_eq!((y.dims(), y.dtype(), y.is_meta()), (&[1 << 10, 1 << 20][..], DType::BF16, true));
    for error in [
        x.to_vec::<bf16>().unwrap_err(),
        x.sum_all()?.item::<bf16>().unwrap_err(),
        x.to_f64_vec().unwrap_err(),
        x.to_device(Device::Cpu).unwrap_err(),
    ] {
        assert!(matches!(error, Error::NoValue { .. }), "{error}");
    }
    assert_eq!(format!("{}", Tensor::meta_of([2, 3], DType::F32)?), "meta(f32 [2, 3])");
    let real = Tensor::ones([2], DType::F32)?;
    assert!(real.to_device(Device::Meta)?.is_meta());
    assert_eq!(real.to_device(Device::Cpu)?.to_vec::<f32>()?, [1., 1.]);
    assert!(x.zeros_like()?.is_meta() && x.add(&x)?.is_meta());
    Ok(())
}

#[test]
fn operators_combine_tensors_and_numbers() -> Result<()> {
    let (a, b) = (f64s(&[1., 2.], &[2]), f64s(&[4., 8.], &[2]));
    let v = |x: Result<Tensor>| x.unwrap().to_vec::<f64>().unwrap();
    assert_eq!(v(&a + &b), [5., 10.]);
    assert_eq!(v(&a - &b), [-3., -6.]);
    assert_eq!(v(&a * &b), [4., 16.]);
    assert_eq!(v(&a / &b), [0.25, 0.25]);
    assert_eq!(v(&a + 0.5), [1.5, 2.5]);
    assert_eq!(v(&a - 0.5), [0.5, 1.5]);
    assert_eq!(v(&a * 0.5), [0.5, 1.]);
    assert_eq!(v(&a / 0.5), [2., 4.]);
    assert_eq!(v(0.5 + &a), [1.5, 2.5]);
    assert_eq!(v(0.5 - &a), [-0.5, -1.5]);
    assert_eq!(v(0.5 * &a), [0.5, 1.]);
    assert_eq!(v(4.0 / &a), [4., 2.]);
    assert_eq!(v(-&a), [-1., -2.]);
    // A number of any Rust type takes the tensor's dtype.
    let half = Tensor::full([1], 1, DType::BF16)?;
    for sum in [half.add(1)?, half.add(1i64)?, half.add(1u8)?, half.add(1f32)?, half.add(1f64)?] {
        assert_eq!((sum.dtype(), sum.item_f64()?), (DType::BF16, 2.0));
    }
    assert_eq!(half.add(Scalar::Int(2))?.item_f64()?, 3.0);
    assert!((&a + &half).is_err());
    Ok(())
}

/// The expected strings are what NumPy 2.4 prints for `str(array)`.
#[test]
fn tensors_print_as_numpy_prints_arrays() -> Result<()> {
    let (nan, inf) = (f64::NAN, f64::INFINITY);
    let d = |values: &[f64]| f64s(values, &[values.len()]);
    let s = |values: &[f64]| d(values).to_dtype(DType::F32).unwrap();
    let h = |values: &[f64]| d(values).to_dtype(DType::F16).unwrap();
    let range = |n: i64, shape: &[usize]| {
        Tensor::arange(0, n, 1, DType::I64).unwrap().reshape(Shape::from(shape)).unwrap()
    };
    let eighths = |n: i64, shape: &[usize]| range(n, shape).to_dtype(DType::F64).unwrap().div(8.0).unwrap();
    let scalar = |x: f64| f64s(&[x], &[]);
    let table: Vec<(Tensor, &str)> = vec![
        // Integers.
        (Tensor::from_slice(&[1i64, 20, -3], [3])?, "[ 1 20 -3]"),
        (Tensor::from_slice(&[1u8, 200, 3], [3])?, "[  1 200   3]"),
        (Tensor::from_slice(&[9007199254740993i64, -1], [2])?, "[9007199254740993               -1]"),
        (range(6, &[2, 3]), "[[0 1 2]\n [3 4 5]]"),
        // Floating-point numbers.
        (d(&[1., 2.5, -3.25]), "[ 1.    2.5  -3.25]"),
        (d(&[1., 2., 3.]), "[1. 2. 3.]"),
        (d(&[1. / 3., 2. / 3.]), "[0.33333333 0.66666667]"),
        (s(&[1. / 3., 2. / 3.]), "[0.33333334 0.6666667 ]"),
        (s(&[0.1, 0.2, 0.3]), "[0.1 0.2 0.3]"),
        (d(&[1.23456789012, 0.5]), "[1.23456789 0.5       ]"),
        (s(&[1.23456789012, 0.5]), "[1.2345679 0.5      ]"),
        (s(&[0.0012345678]), "[0.00123457]"),
        (d(&[0.999999999, 1.]), "[1. 1.]"),
        (d(&[9.999999999, 1.]), "[10.  1.]"),
        (d(&[-0.0, 0.0]), "[-0.  0.]"),
        (d(&[0., 0.]), "[0. 0.]"),
        (d(&[3.25179]), "[3.25179]"),
        (f64s(&[1.5, -2., 300., 4.25], &[2, 2]), "[[  1.5   -2.  ]\n [300.     4.25]]"),
        (eighths(4, &[4, 1]).mul(8.0)?, "[[0.]\n [1.]\n [2.]\n [3.]]"),
        // Mixed or extreme magnitudes.
        (d(&[1e-5, 1., 1000.]), "[1.e-05 1.e+00 1.e+03]"),
        (s(&[1e-5, 1., 1000.]), "[1.e-05 1.e+00 1.e+03]"),
        (d(&[1., 1000.]), "[   1. 1000.]"),
        (d(&[1., 1001.]), "[1.000e+00 1.001e+03]"),
        (d(&[0.5, 1000.]), "[5.e-01 1.e+03]"),
        (d(&[1e8, 2e8]), "[1.e+08 2.e+08]"),
        (d(&[12345678., 2e7]), "[12345678. 20000000.]"),
        (d(&[0.0001, 0.0002]), "[0.0001 0.0002]"),
        (s(&[0.0001, 0.0002]), "[0.0001 0.0002]"),
        (d(&[0.00009, 0.0002]), "[9.e-05 2.e-04]"),
        (d(&[1.23456789012e-7, 0.5]), "[1.23456789e-07 5.00000000e-01]"),
        (s(&[1.23456789012e-7, 0.5]), "[1.2345679e-07 5.0000000e-01]"),
        (s(&[1.2345678e-5, 0.1]), "[1.2345678e-05 1.0000000e-01]"),
        (s(&[0.1, 123456.7]), "[1.000000e-01 1.234567e+05]"),
        (s(&[999.9999, 0.001]), "[9.999999e+02 1.000000e-03]"),
        (s(&[3.4028234663852886e38, 1.]), "[3.4028235e+38 1.0000000e+00]"),
        (d(&[1e100, 1.]), "[1.e+100 1.e+000]"),
        (d(&[1e-100, 1e5]), "[1.e-100 1.e+005]"),
        (d(&[9.999999999e10, 1.]), "[1.e+11 1.e+00]"),
        (d(&[-1e10, 1e-3]), "[-1.e+10  1.e-03]"),
        (d(&[1234567.891, 2.]), "[1.23456789e+06 2.00000000e+00]"),
        (f64s(&[1e-9, 1., 2., 3.], &[2, 2]), "[[1.e-09 1.e+00]\n [2.e+00 3.e+00]]"),
        // Non-finite values.
        (d(&[nan, 1., 2.]), "[nan  1.  2.]"),
        (d(&[inf, -inf, 1.5]), "[ inf -inf  1.5]"),
        (d(&[nan, 1e10, -inf]), "[   nan 1.e+10   -inf]"),
        (d(&[nan, inf]), "[nan inf]"),
        (d(&[-inf]), "[-inf]"),
        (f64s(&[nan, 1., 2.5, -inf], &[2, 2]), "[[ nan  1. ]\n [ 2.5 -inf]]"),
        // Half precision prints the fewest digits that distinguish a value from its neighbours.
        (h(&[0.1, 1., 65504.]), "[1.00e-01 1.00e+00 6.55e+04]"),
        (h(&[0.1, 1., 2.5]), "[0.1 1.  2.5]"),
        (h(&[0.00001, 1.]), "[1.e-05 1.e+00]"),
        // Scalars (0-d).
        (scalar(1.5), "1.5"),
        (Tensor::scalar(7i64)?, "7"),
        (scalar(1e-7), "1e-07"),
        (scalar(1e20), "1e+20"),
        (scalar(1e16), "1e+16"),
        (scalar(123456789.0), "123456789.0"),
        (scalar(0.0001), "0.0001"),
        (scalar(1. / 3.), "0.3333333333333333"),
        (scalar(-0.0), "-0.0"),
        (scalar(nan), "nan"),
        (scalar(-inf), "-inf"),
        (Tensor::scalar(0.1f32)?, "0.1"),
        (Tensor::scalar(1f32 / 3.)?, "0.33333334"),
        (Tensor::scalar(999999f32)?, "999999.0"),
        (Tensor::scalar(16777216f32)?, "1.6777216e+07"),
        (Tensor::scalar(f16::from_f32(1024.))?, "1.024e+03"),
        (Tensor::scalar(f16::from_f32(0.1))?, "0.1"),
        // Empty tensors.
        (Tensor::zeros([0], DType::F64)?, "[]"),
        (Tensor::zeros([2, 0], DType::F64)?, "[]"),
        (Tensor::zeros([0, 2], DType::I64)?, "[]"),
        (Tensor::zeros([2, 3, 0], DType::F64)?, "[]"),
        // One blank line separates matrices; each further dim adds one.
        (
            eighths(12, &[2, 3, 2]).mul(8.0)?,
            "[[[ 0.  1.]\n  [ 2.  3.]\n  [ 4.  5.]]\n\n [[ 6.  7.]\n  [ 8.  9.]\n  [10. 11.]]]",
        ),
        (
            range(16, &[2, 2, 2, 2]),
            "[[[[ 0  1]\n   [ 2  3]]\n\n  [[ 4  5]\n   [ 6  7]]]\n\n\n [[[ 8  9]\n   [10 11]]\n\n  [[12 13]\n   [14 15]]]]",
        ),
        // Long rows wrap.
        (
            range(30, &[30]).mul(1000)?,
            "[    0  1000  2000  3000  4000  5000  6000  7000  8000  9000 10000 11000\n 12000 13000 14000 15000 \
             16000 17000 18000 19000 20000 21000 22000 23000\n 24000 25000 26000 27000 28000 29000]",
        ),
        (
            range(25, &[25]).add(10)?,
            "[10 11 12 13 14 15 16 17 18 19 20 21 22 23 24 25 26 27 28 29 30 31 32 33\n 34]",
        ),
        (
            range(15, &[1, 15]).add(1000)?,
            "[[1000 1001 1002 1003 1004 1005 1006 1007 1008 1009 1010 1011 1012 1013\n  1014]]",
        ),
        (
            d(&[-1.123456789; 7]),
            "[-1.12345679 -1.12345679 -1.12345679 -1.12345679 -1.12345679 -1.12345679\n -1.12345679]",
        ),
        (
            Tensor::full([5], 100000000000000000i64, DType::I64)?,
            "[100000000000000000 100000000000000000 100000000000000000\n 100000000000000000 100000000000000000]",
        ),
        (
            eighths(60, &[2, 1, 30]),
            "[[[0.    0.125 0.25  0.375 0.5   0.625 0.75  0.875 1.    1.125 1.25\n   1.375 1.5   1.625 1.75  \
             1.875 2.    2.125 2.25  2.375 2.5   2.625\n   2.75  2.875 3.    3.125 3.25  3.375 3.5   3.625]]\n\n \
             [[3.75  3.875 4.    4.125 4.25  4.375 4.5   4.625 4.75  4.875 5.\n   5.125 5.25  5.375 5.5   \
             5.625 5.75  5.875 6.    6.125 6.25  6.375\n   6.5   6.625 6.75  6.875 7.    7.125 7.25  7.375]]]",
        ),
        // Large tensors print only their edges.
        (range(1001, &[1001]), "[   0    1    2 ...  998  999 1000]"),
        (
            range(2000, &[40, 50]),
            "[[   0    1    2 ...   47   48   49]\n [  50   51   52 ...   97   98   99]\n [ 100  101  102 ...  \
             147  148  149]\n ...\n [1850 1851 1852 ... 1897 1898 1899]\n [1900 1901 1902 ... 1947 1948 \
             1949]\n [1950 1951 1952 ... 1997 1998 1999]]",
        ),
        (
            range(3000, &[1000, 3]),
            "[[   0    1    2]\n [   3    4    5]\n [   6    7    8]\n ...\n [2991 2992 2993]\n [2994 2995 \
             2996]\n [2997 2998 2999]]",
        ),
        (
            range(4000, &[4, 1000]),
            "[[   0    1    2 ...  997  998  999]\n [1000 1001 1002 ... 1997 1998 1999]\n [2000 2001 2002 ... \
             2997 2998 2999]\n [3000 3001 3002 ... 3997 3998 3999]]",
        ),
    ];
    for (tensor, want) in &table {
        assert_eq!(format!("{tensor}"), *want);
    }
    // At the threshold every element is printed.
    let all = range(1000, &[1000]).to_string();
    assert_eq!((all.lines().count(), all.contains("...")), (56, false));
    assert_eq!(all.lines().last(), Some(" 990 991 992 993 994 995 996 997 998 999]"));
    // In three dims the edges of each dim are printed.
    let cube = range(8000, &[20, 20, 20]).to_dtype(DType::F64)?.to_string();
    let lines: Vec<&str> = cube.lines().collect();
    assert_eq!(lines.len(), 6 * 7 + 6 + 1);
    assert_eq!(lines[0], "[[[0.000e+00 1.000e+00 2.000e+00 ... 1.700e+01 1.800e+01 1.900e+01]");
    assert_eq!(lines[3], "  ...");
    assert_eq!(lines[23..26], ["", " ...", ""]);
    Ok(())
}

#[test]
fn bf16_prints_the_fewest_digits_that_read_back() -> Result<()> {
    let x = f64s(&[0.1, 1., 3.140625], &[3]).to_dtype(DType::BF16)?;
    assert_eq!(x.to_string(), "[0.1  1.   3.14]");
    let x = f64s(&[1e-20, 3e38], &[2]).to_dtype(DType::BF16)?;
    assert_eq!(x.to_string(), "[1.e-20 3.e+38]");
    // The printed text reads back as the same number.
    for bits in (0..0x7f80u16).step_by(37) {
        let x = bf16::from_bits(bits);
        let text = Tensor::scalar(x)?.to_string();
        assert_eq!(bf16::from_f64(text.parse().unwrap()), x, "{text}");
        let y = f16::from_bits(bits % 0x7c00);
        let text = Tensor::scalar(y)?.to_string();
        assert_eq!(f16::from_f64(text.parse().unwrap()), y, "{text}");
    }
    Ok(())
}

#[test]
fn debug_shows_dtype_shape_and_requires_grad() -> Result<()> {
    let x = Tensor::from_slice(&[1f32, 2.5], [2])?;
    assert_eq!(format!("{x:?}"), "tensor([1. , 2.5], dtype=f32)");
    assert_eq!(format!("{:?}", x.requires_grad_(true)?), "tensor([1. , 2.5], dtype=f32, requires_grad)");
    let x = Tensor::from_slice(&[1i64, 2, 3, 40], [2, 2])?;
    assert_eq!(format!("{x:?}"), "tensor([[ 1,  2],\n        [ 3, 40]], dtype=i64)");
    assert_eq!(format!("{:?}", Tensor::scalar(3f64)?), "tensor(3.0, dtype=f64)");
    assert_eq!(format!("{:?}", Tensor::zeros([2, 0], DType::U8)?), "tensor([], shape=[2, 0], dtype=u8)");
    let x = Tensor::meta_of([2, 3], DType::BF16)?;
    assert_eq!(format!("{x:?}"), "tensor(..., shape=[2, 3], device=meta, dtype=bf16)");
    assert_eq!(
        format!("{:?}", Tensor::arange(0, 1001, 1, DType::I64)?),
        "tensor([   0,    1,    2, ...,  998,  999, 1000], dtype=i64)"
    );
    Ok(())
}

#[test]
fn a_long_chain_of_views_is_one_view() -> Result<()> {
    let turned = std::thread::Builder::new()
        .stack_size(1 << 18)
        .spawn(|| {
            let mut x = Tensor::arange(0, 6, 1, DType::F32)?.reshape([2, 3])?;
            for _ in 0..200_001 {
                x = x.t()?;
            }
            x.to_vec::<f32>()
        })
        .unwrap();
    assert_eq!(turned.join().unwrap()?, [0., 3., 1., 4., 2., 5.]);
    Ok(())
}

#[test]
fn half_precision_losses_and_deviations_survive_sums_that_overflow() -> Result<()> {
    // The sum of 8192 losses of about 10 exceeds the largest f16, but their mean does not.
    let logits =
        Tensor::cat(&[&Tensor::zeros([8192, 1], DType::F16)?, &Tensor::full([8192, 1], 10, DType::F16)?], 1)?;
    let target = Tensor::zeros([8192], DType::I64)?;
    let loss = logits.cross_entropy(&target, CrossEntropyOptions::default())?;
    assert_eq!((loss.dtype(), loss.item_f64()?), (DType::F16, 10.0));
    // The variance overflows f16, but the standard deviation fits.
    let x = Tensor::from_slice(&[-300f32, 300.], [2])?.to_dtype(DType::F16)?;
    assert_eq!(x.std(0, 0.0, false)?.item_f64()?, 300.0);
    Ok(())
}

#[test]
fn numbers_can_be_either_operand() -> Result<()> {
    let x = Tensor::from_slice(&[1f32, 4.], [2])?;
    for (got, want) in [
        ((&x * 2)?, [2f32, 8.]),
        ((2 * &x)?, [2., 8.]),
        ((1 - &x)?, [0., -3.]),
        ((8.0 / &x)?, [8., 2.]),
        ((&x / 2)?, [0.5, 2.]),
        (x.rpow(2.0)?, [2., 16.]),
    ] {
        assert_eq!(got.to_vec::<f32>()?, want);
    }
    let like = x.randn_like()?;
    assert_eq!((like.dims(), like.dtype()), (x.dims(), DType::F32));
    assert!(x.rand_like()?.to_vec::<f32>()?.iter().all(|v| (0.0..1.0).contains(v)));
    Ok(())
}

#[test]
fn a_view_larger_than_memory_can_be_printed() -> Result<()> {
    let huge = Tensor::from_slice(&[7i64], [1])?.expand([1 << 40])?;
    assert_eq!(huge.to_string(), "[7 7 7 ... 7 7 7]");
    Ok(())
}
