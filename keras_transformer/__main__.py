from keras_transformer.cli import main

main()
