//! [`Value`]: a type that collectives can move.

use dtensor_array::kernels::cat::cat;
use dtensor_array::{Array, Meta, Shape};

use crate::{Collective, Error, Group, Result, Site};

/// Turns the result of a collective into a value. It gets `None` if the value has no data.
pub type Finish<V> = Box<dyn FnOnce(Option<Array>) -> Result<V> + Send>;

/// A type that collectives can move: an [`Array`], or a type of another crate that holds one, for example a tensor that records
/// gradients.
pub trait Value: Clone + Send + 'static {
    /// Returns shape, dtype and device.
    fn meta(&self) -> Meta;

    /// Returns the array to move, or `None` if the value has no data. Returns an error, which names `op`, if the value cannot be
    /// moved.
    fn array(&self, op: &'static str) -> Result<Option<Array>>;

    /// Wraps an array that a collective returned.
    fn from_array(array: Array) -> Self;

    /// Returns an error if the value requires a gradient. Called by the collectives that do not pass gradients on, so that no
    /// gradient is lost silently.
    fn check_constant(&self, op: &'static str) -> Result<()> {
        let _ = op;
        Ok(())
    }

    /// Returns true if this value requires a gradient.
    fn requires_grad(&self) -> bool {
        false
    }

    /// Returns the function that makes a value of the collective's result. Called when a collective with one output begins.
    #[track_caller]
    fn finish(&self, group: &Group, collective: &Collective, at: &Site) -> Finish<Self>;

    /// Reshapes each value to `rows` rows and concatenates them along the columns.
    #[track_caller]
    fn join(values: &[&Self], rows: usize) -> Result<Self>;

    /// Splits a matrix that [`join`](Value::join) made into blocks of `columns` columns, and reshapes each block to its shape in
    /// `shapes`. `inputs` are the values that were joined.
    #[track_caller]
    fn split(self, columns: &[usize], shapes: &[Shape], inputs: &[Self]) -> Result<Vec<Self>>;
}

impl Value for Array {
    fn meta(&self) -> Meta {
        Array::meta(self)
    }

    fn array(&self, _: &'static str) -> Result<Option<Array>> {
        Ok(Some(self.clone()))
    }

    fn from_array(array: Array) -> Self {
        array
    }

    fn finish(&self, _: &Group, collective: &Collective, _: &Site) -> Finish<Self> {
        let op = collective.name();
        Box::new(move |array| {
            array.ok_or_else(|| Error::argument(op, "the collective returned no value on this rank"))
        })
    }

    fn join(values: &[&Self], rows: usize) -> Result<Self> {
        let matrix = |x: &&Array| x.reshape(&[rows, x.numel() / rows]);
        let matrices: Vec<Array> = values.iter().map(matrix).collect::<Result<_>>()?;
        cat(&matrices.iter().collect::<Vec<_>>(), 1)
    }

    fn split(self, columns: &[usize], shapes: &[Shape], _: &[Self]) -> Result<Vec<Self>> {
        let mut start = 0;
        let block = |(&n, shape): (&usize, &Shape)| {
            start += n;
            self.narrow(1, start - n, n)?.reshape(shape)
        };
        columns.iter().zip(shapes).map(block).collect()
    }
}
